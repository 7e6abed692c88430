"""Owns the benchmark of program verdicts: how many right programs pass, how many faulty ones, how long a verdict takes.

Must not judge anything that a model wrote.
"""
