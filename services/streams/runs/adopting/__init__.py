"""Owns runs whose record Redis has lost: which of them are left in folders and stores, and their adoption.

Must not resume a run.
"""
