"""Owns how what a run has produced is shown: its story, logs, files, and runs beside each other.

Must not read Redis or a file.
"""
