"""Owns files that outlive a node: a run's files in an S3-compatible store, and inputs that recipes name there.

Must not know what a file means; its writer does.
"""
