"""Owns judgement: samples in, verdicts out; one file per verifier, which runs in a process that can be killed.

Must not import torch, or trust a response's text.
"""
