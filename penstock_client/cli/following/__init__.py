"""Owns how a run is followed and shown: lines for a pipe, a live view for a terminal, and tables.

Must not call the API, except to follow a run.
"""
