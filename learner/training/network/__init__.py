"""Owns the policy network: its weights, loaded from a folder, and its forward pass.

Must not know optimizers, batches of the queue or DeepSpeed.
"""
