"""Owns every byte in Redis: connections, keys, Lua transitions, leases, payloads, records.

Must not interpret a policy or a verdict. It is the only package that imports redis.
"""
