"""Owns the measurements of whole runs on real engines.

Must not simulate; benchmarks/simulation does.
"""
