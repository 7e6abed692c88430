"""Owns the dynamic-sampling queue: prompts out, verdicts in, batches out.

Must not touch tokens, nor know any engine.
"""
