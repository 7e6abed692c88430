"""Owns the benchmark of weight publications: how fast a version reaches every replica, and what a request sees of it.

Must not be imported by a service.
"""
