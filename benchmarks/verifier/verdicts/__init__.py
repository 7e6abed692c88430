"""Owns the measurement of verdicts against data with known answers, one module for each table.

Must not hold data: each table reads a folder that its caller names.
"""
