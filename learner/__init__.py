"""Owns the learner: it trains on batches and publishes policy versions.

Must not import any other service's package than `services`. It is the only importer of deepspeed.
"""
