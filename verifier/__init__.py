"""Owns judgement: samples in, verdicts out; one file per verifier, each in a process that can be killed.

Must not import torch, nor trust a response's text.
"""
