"""Owns the rollout replica: tasks in, samples out, weights in.

Must not import anything but services; it is the only importer of vllm.
"""
