"""Owns the verdict on mathematical answers: what is the answer of a response, and does it equal the reference's.

Must not import math-verify or sympy, except in `symbolic`, and there only when a formula is judged.
"""
