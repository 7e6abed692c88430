"""Owns the commands over data sets: `penstock data ...`.

Must not load data for a run; the sampler does.
"""
