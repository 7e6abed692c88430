"""Owns what every request must pass before a route sees it.

Must not know a route.
"""
