"""Owns the client of Penstock's REST API: the library, and the part of the command `penstock` that only calls the API.

Must not import anything of the platform; the library needs httpx and pydantic alone.
"""
