"""Owns what Redis holds of a run besides its streams: groups, policy versions, ownership, records, heartbeats.

Must not decide anything about a run; services do, and each transition is one call of a Redis function.
"""
