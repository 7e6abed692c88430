"""Owns what the operator of a platform sets for all runs, in the environment of the controller and the API.

Must not be part of a recipe.
"""
