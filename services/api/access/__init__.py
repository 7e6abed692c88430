"""Owns who may do what: the access file, sign-in, roles, quotas of projects, notes for the audit log.

Must not serve a route.
"""
