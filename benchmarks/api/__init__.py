"""Owns the measurements of the REST gateway.

Must not be imported by the platform.
"""
