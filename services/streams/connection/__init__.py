"""Owns the connection to Redis: its address, credentials, client, and the library of Redis functions.

Must not know what a stream or a record means.
"""
