"""Owns the evaluation of a policy on held-out prompts: when, on which tasks, and the scores.

Must not train on what it generates, or take slots that training needs.
"""
