"""Owns what Redis holds about access: the audit log, and the locks of projects.

Must not know who may do what.
"""
