"""Owns the optimizer steps of a batch: mini-batches, the policy network, the DeepSpeed engine, its state.

Must not read Redis; it receives batches and returns metrics.
"""
