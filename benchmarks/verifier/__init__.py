"""Owns the verifier's benchmark: attacks, hangs, and the cost of a verdict.

Must not train, nor need a server.
"""
