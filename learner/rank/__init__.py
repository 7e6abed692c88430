"""Owns the work of one learner rank: commands from rank 0, training of its share, its file of a checkpoint.

Must not decide when to train, publish or save; rank 0's coordinator does.
"""
