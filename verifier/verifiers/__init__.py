"""Owns the verifiers, one file each: a response and its reference in, a judgement out.

Must not import its modules here: reward libraries load only in the process that judges.
"""
