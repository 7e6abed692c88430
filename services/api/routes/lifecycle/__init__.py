"""Owns the routes of a run's life: submit, clone, adopt, edit, pause, resume, cancel, archive, delete.

Must not act on a run; a route changes the record, the controller acts.
"""
