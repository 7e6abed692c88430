"""Owns the settings of the algorithm: losses, advantages, dynamic sampling, the value head.

Must not import its modules here.
"""
