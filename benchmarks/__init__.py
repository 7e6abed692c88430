"""Owns the benchmarks: what is measured and how. `penstock bench` lists them and runs one by its name.

Must not be imported by a package of the platform. Of tests it uses the harness alone, for servers and stub engines.
"""
