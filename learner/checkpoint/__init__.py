"""Owns a run's checkpoints: their files on disk and in the store, and how all ranks complete one.

Must not know what a tensor in them means; `learner.training.state` does.
"""
