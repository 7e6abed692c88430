"""Owns the data plane benchmark: what moving groups through Redis costs, with the real services and a stub engine.

Must not need a model, a GPU or torch's learner.
"""
