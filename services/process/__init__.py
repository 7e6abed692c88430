"""Owns the service process: what hosts one service of one run, and how a process ends.

Must not know any service.
"""
