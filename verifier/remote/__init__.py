"""Owns rewards that are judged elsewhere: your service, a judge model, and functions that need network or files.

Must not be imported by a confined process: these rewards send requests.
"""
