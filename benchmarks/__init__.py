"""Owns the benchmarks. None of them is part of `make test`.

Must not be imported by a package of the platform, or import tests.
"""
