"""Owns what follows a stop: where a learner resumes, the repair of archived batches, and replay.

Must not extend a run; every step that it trains was recorded before.
"""
