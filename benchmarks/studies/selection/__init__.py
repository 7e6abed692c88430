"""Owns the comparison of prompt selection strategies on simulated prompts with known pass rates.

Must not use the platform except for its rules of selection, screening and filtering.
"""
