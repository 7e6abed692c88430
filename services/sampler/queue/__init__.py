"""Owns the loop of the dynamic-sampling queue and its parts: dispatch, intake, publication, starvation, waits.

Must not decide what a group is worth; `selection` and `advantage` do.
"""
