"""Owns what Redis holds of runs that have ended: how they stand, and what is deleted of them.

Must not touch a run that has not ended.
"""
