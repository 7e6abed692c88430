"""Owns what the REST API sends as server-sent events: one reader for all open streams, and the streams themselves.

Must not decide who may read a run.
"""
