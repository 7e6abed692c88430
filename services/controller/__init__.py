"""Owns the way from a run's desired state to its actual one, through the Cluster protocol.

Must not import Ray or any engine.
"""
