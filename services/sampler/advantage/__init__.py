"""Owns group-level credit: what a response earns, which groups carry signal, who gains from it.

Must not do I/O or import numerical libraries; token-level maths is the learner's.
"""
