"""Owns the REST gateway: every action of a user.

Must not act on runs; it writes records, the controller acts.
"""
