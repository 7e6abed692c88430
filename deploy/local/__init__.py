"""Owns the laptop stack: embedded Redis, local Ray and the gateway, started and ended as one.

Must not import ray in the process that supervises.
"""
