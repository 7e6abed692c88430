"""Owns the processes of an engine: how they are started, and what runs in them.

Must not know groups or streams.
"""
