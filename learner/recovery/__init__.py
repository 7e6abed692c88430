"""Owns recovery: where a learner resumes a run, the repair of archived batches, and replay.

Must not extend a run; every step that it trains was recorded before.
"""
