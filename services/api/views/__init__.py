"""Owns the schemas of the REST API, one module per subject: requests and responses, as OpenAPI documents them.

Must not read Redis.
"""
