"""Owns the comparison of tuning with the best static settings: on a simulated pipeline, and on this machine.

Must not contain a rule of tuning; `services.controller.tuning` has them.
"""
