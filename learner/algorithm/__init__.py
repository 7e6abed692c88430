"""Owns the token-level maths of learning: log-probs, ratios, clipping, corrections, reductions.

Must not import anything but the standard library and torch.
"""
