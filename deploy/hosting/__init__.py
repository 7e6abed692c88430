"""Owns the placement and restarts of services: the only package that imports ray.

Must not know what a service does.
"""
