"""Owns the simulation of a run as discrete events, with the sampler's own rules: what its benchmarks share.

Must not contain a rule of the sampler, nor what one benchmark alone needs.
"""
