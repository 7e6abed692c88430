"""Owns the REST gateway: every action a person can take.

Must not act on runs; it writes records, the controller acts.
"""
