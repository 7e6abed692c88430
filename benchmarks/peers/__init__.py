"""Owns the comparisons with what a user would use instead, each peer in an environment of its own.

Must not contain a peer's code or formulas: its own package is called.
"""
