"""Owns the page in a browser: its files in static/, and in vendor/ how those of other libraries are built.

Must not be imported: services/api/routes/page.py serves the files.
"""
