"""Owns the benchmark of the start: from `penstock up` to the first token and the first optimizer step.

Must not be imported by product code.
"""
