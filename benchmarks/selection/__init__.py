"""Owns the comparison of prompt selection strategies on simulated prompts of known pass rates.

Must not know the platform but by its rules of selection, screening and filtering.
"""
