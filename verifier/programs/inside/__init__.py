"""Owns what runs inside a jail: a supervisor, and per test a process with the program.

Must not import anything but the standard library: a jail contains no other package.
"""
