"""Owns the archiving of groups that have ended: what became of each is written to the run's files.

Must not change how a group ends.
"""
