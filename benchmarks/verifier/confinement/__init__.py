"""Owns the confinement benchmark: judgements per second with and without the confinement of the judging processes.

Must not judge anything that a model wrote.
"""
