"""Owns observability as code: dashboards, the scrape configuration, and the tools that check them.

Must not be imported by a service.
"""
