"""Owns what is known of Ray's nodes: whether they joined, their devices, and where processes die early.

Must not know what a service does.
"""
