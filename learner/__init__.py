"""Owns the learner: it trains on batches and publishes policy versions.

Must not import any of the project's packages except `services`. It is the only importer of deepspeed.
"""
