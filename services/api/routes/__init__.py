"""Owns the routes of the REST API, one module per subject; services/api/app.py lists their routers.

Must not act on runs; a route changes records, the controller acts.
"""
