"""Owns the rewards of responses, the filter of groups without a signal, and advantages.

Must not do I/O or import numerical libraries; token-level maths is the learner's.
"""
