"""Owns which files a recipe may name, and how such a file is opened.

Must not know a setting of a recipe: callers pass its name for errors.
"""
