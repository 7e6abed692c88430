"""Owns the commands of `penstock`, one file for each subject.

Must not register a command; `deploy.cli.main` holds the table of them.
"""
