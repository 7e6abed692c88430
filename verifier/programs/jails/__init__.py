"""Owns what a jail is made of: its places, its filter of system calls, the frames that go into it and come out.

Must not start a process.
"""
