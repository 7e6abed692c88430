"""Owns the tracker: it copies a run's log to the trackers that the recipe names, and never disturbs the run.

Must not be needed to train, nor write anything that another service reads, except events.
"""
