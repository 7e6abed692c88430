"""Owns what the controller does with runs that end or have ended, and with functions that earlier releases loaded.

Must not control a run; its RunController does.
"""
