"""Owns the measurements of the learner alone: its step, its memory, and both on a GPU.

Must not start a stack.
"""
