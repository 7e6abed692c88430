"""Owns measurements of memory: what loading a policy, its snapshot and the learner's log-probs take.

Must not estimate; the learner and the controller do, and these measure beside them.
"""
