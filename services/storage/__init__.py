"""Owns what outlives a node: a run's files in an S3-compatible store, and what recipes name there.

Must not know what a file means; whoever writes it does.
"""
