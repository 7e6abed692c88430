"""Owns tuning: how the controller holds a run's idle share and staleness by moving its limits and replicas.

Must not move a setting outside the bounds of the recipe's section `tuning`.
"""
