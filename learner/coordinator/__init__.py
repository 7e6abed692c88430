"""Owns rank 0 of a run: start, train, publish, commit, end.

Must not compute a loss or touch another rank's tensors; it sends commands to the ranks.
"""
