"""Owns how an entry of a stream reaches its consumer: reading, leases, validation, payloads.

Must not know what a run is doing; `state` holds that.
"""
