"""Owns what the verifier's processes ask of the kernel: that they end with their parent, and that groups end whole.

Must not know what the processes are for.
"""
