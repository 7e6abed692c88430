"""Owns studies of what is learned: the paper's ablation, PPO beside DAPO, strategies of prompt selection.

Must not measure speed.
"""
