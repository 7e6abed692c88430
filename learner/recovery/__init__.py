"""Owns recovery: where a learner resumes a run, and replay.

Must not extend a run; every step that it trains was recorded before.
"""
