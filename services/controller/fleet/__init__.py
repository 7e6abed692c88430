"""Owns how many processes a run has: the sizes of its fleets, and whether a limited cluster has room for them.

Must not start or stop a process; the cluster does.
"""
