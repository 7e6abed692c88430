"""Owns the comparison of PPO with DAPO at laptop scale, with the task and the budget of the ablation.

Must not use the platform except through its REST API.
"""
