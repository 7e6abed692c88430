"""Owns the sinks of trackers, one file for each library.

Must not read Redis.
"""
