"""Owns the reading of one answer's text as a value: its notation, numbers, units, structure and doubts.

Must not compare values, and must not import math-verify or sympy.
"""
