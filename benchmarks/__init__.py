"""Owns what is measured and how; nothing here is part of `make test`.

Must not be imported by a package of the platform.
"""
