"""Owns the controller: it brings every run into its desired state, through the Cluster protocol.

Must not import Ray or any engine.
"""
