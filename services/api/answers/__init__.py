"""Owns what the REST API answers, whatever the route: problem details of errors, and the OpenAPI document.

Must not serve a route.
"""
