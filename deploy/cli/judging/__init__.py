"""Owns the commands that judge without a run, and how they judge on this machine.

Must not judge itself; the verifier does, as confined as in a run.
"""
