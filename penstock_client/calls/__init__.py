"""Owns the calls of the API, one file for each subject; penstock_client.client joins them.

Must not print.
"""
