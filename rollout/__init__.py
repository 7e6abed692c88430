"""Owns the rollout replica: tasks in, samples out, weights in.

Must not import other packages than services; only this package imports vllm.
"""
