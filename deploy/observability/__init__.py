"""Owns observability as code: dashboards, the scrape configuration, and the command that checks them.

Must not be imported by a service.
"""
