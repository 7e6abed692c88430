"""Owns what is done with the records of many runs, or with what is left of one: lists, edits, adoption.

Must not act on a run; the controller does.
"""
