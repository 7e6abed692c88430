"""Owns the controller: it brings every run from its desired state to its actual one, through the Cluster protocol.

Must not import Ray or any engine.
"""
