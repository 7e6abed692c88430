"""Owns the benchmark of replicas that are taken away: real engines of a tiny model, one of which ends every 30 s.

Must not need a GPU, a learner or Ray.
"""
