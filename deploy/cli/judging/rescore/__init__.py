"""Owns `penstock rescore`: the trained responses of a run judged again, and what that changes.

Must not change anything of a run.
"""
