"""Owns the form of every benchmark's result: figures with their spread, the machine, a table, JSON and a picture.

Must not measure.
"""
