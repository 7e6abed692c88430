"""Owns the benchmark of a learner's step on a CPU, beside a loop that pads: rates, memory, GEMM share.

Must not download anything, or measure a GPU.
"""
