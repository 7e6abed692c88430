"""Owns the settings of rewards: which verifier judges a response, with which options, alone or combined.

Must not import its modules here.
"""
