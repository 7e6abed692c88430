"""Owns the REST routes that show what a run has produced: its story, logs, files, and how runs compare.

Must not change a run.
"""
