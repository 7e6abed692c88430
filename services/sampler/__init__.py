"""Owns the dynamic-sampling queue: it dispatches prompts, records verdicts and publishes batches.

Must not read tokens or depend on an inference engine.
"""
