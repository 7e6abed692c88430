"""Owns the part of the command `penstock` that only calls the API.

Must not import anything of the platform, whose commands deploy.cli adds.
"""
