"""Owns measurements of memory: what loading a policy takes, and what the learner's log-probs take.

Must not estimate; the learner and the controller do, and these measure beside them.
"""
