"""Owns every byte in Redis: connections, keys, Lua transitions, leases, payloads, records.

Must not know what a policy or a verdict means; it is the only importer of redis.
"""
