"""Owns the ablation: Table 1 of the DAPO paper at laptop scale.

Must not use the platform except through its REST API.
"""
