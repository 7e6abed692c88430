"""Owns the controller's view of runs that end or have ended: their summaries, and what becomes of
them. And what earlier releases left in Redis: their functions.

Must not control a run; its RunController does.
"""
