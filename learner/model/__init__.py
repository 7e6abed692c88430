"""Owns the model's files: the folder that a run starts from, its size, and the export that a run ends with.

Must not train.
"""
