"""Owns the tests of programs: records of the usual data sets in one form, and the comparison of what was computed.

Must not run anything of a record or a program in this process.
"""
