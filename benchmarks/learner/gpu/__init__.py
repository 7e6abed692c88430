"""Owns the benchmark of the learner on a GPU: step time, MFU, memory against the plan, and its parts.

Must not need more than torch, DeepSpeed, transformers, pydantic and pyarrow, download anything, or measure an engine.
"""
