"""Owns what the Dockerfile runs: scripts that install packages, and the bill of materials.

Must not be needed by a service at run time.
"""
