"""Owns what rewards keep in Redis: the user's files, and what a judge model may still cost.

Must not import its modules here.
"""
