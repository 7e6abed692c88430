"""Owns the token-level maths of training: log-probs, ratios, clipping, corrections, KL, reductions and the loss.

Must not import anything except the standard library and torch. The examples in its docstrings run as tests
(tests/conformance/test_worked_examples.py).
"""
