"""Owns the simulation of fleets of 1 to 4,096 replicas: how well they are used, and what saturates first.

Must not contain a rule of the sampler.
"""
