"""Owns the confinement of judging: processes without network, files or credentials, each judgement with a deadline.

Must not import its modules here: the confined process imports this package before it is confined.
"""
