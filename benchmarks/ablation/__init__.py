"""Owns the walk through Table 1 of the DAPO paper at laptop scale.

Must not touch the platform but by its REST API.
"""
