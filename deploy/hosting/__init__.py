"""Owns how services are placed and kept alive: the only importer of ray.

Must not know what a service does.
"""
