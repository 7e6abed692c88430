"""Owns the laptop stack: embedded Redis, local Ray and the gateway, started and ended together.

Must not import ray in the supervising process.
"""
