"""Owns the archive of a run's groups: Parquet files that tell what became of each group that has ended.

Must not know Redis, nor decide when a group is archived.
"""
