"""Owns the code that all services share, and the services that need no engine.

Must not import an engine, torch or Ray.
"""
