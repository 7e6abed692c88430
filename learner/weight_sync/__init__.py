"""Owns the sending of policy versions from the learner to the fleet: snapshot, plan, broadcast.

Must not receive weights; `rollout.weight_sync` does.
"""
