"""Owns the commands that only call the API, one file for each subject.

Must not register a command; penstock_client.cli.table does.
"""
