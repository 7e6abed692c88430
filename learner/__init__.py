"""Owns the learner: batches in, policy versions out.

Must not import anything but services; it is the only importer of deepspeed.
"""
