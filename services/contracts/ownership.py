"""Owns how a process names itself as the owner of a role, towards Redis and in the files that it writes.

Must not decide who owns a role.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fence:
    """What an owner sends with each write. The id tells two owners of one epoch apart: a failover may lose an epoch."""

    epoch: int
    owner: str

    @property
    def token(self) -> str:
        """As the functions in services/streams/lua expect it, and as Redis stores it."""
        return f"{self.epoch} {self.owner}"


UNOWNED = Fence(0, "")
"""The fence of a process that owns no role, and of files that a release without owners wrote."""
