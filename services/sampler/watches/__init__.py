"""Owns what the sampler watches in Redis: its memory, and groups that differ from what the sampler believes.

Must not free memory, nor release or change a group.
"""
