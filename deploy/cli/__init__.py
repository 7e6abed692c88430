"""Owns the command `penstock`.

Must not do what the REST API does; it only calls it.
"""
