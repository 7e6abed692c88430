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

    @classmethod
    def parse(cls, token: bytes | None) -> Fence:
        """A token that Redis stored; the id is '' where an older release stored the epoch alone."""
        epoch, _, owner = (token or b"0").decode().partition(" ")
        return cls(int(epoch), owner)

    def replaces(self, other: Fence) -> bool:
        """Whether this is a newer owner of the role than `other`. A failover may have given an epoch twice."""
        return self.epoch > other.epoch or (self.epoch == other.epoch and self.owner not in ("", other.owner))

    def may_delete(self, writer: Fence) -> bool:
        """Whether this owner may delete, rename or set aside what `writer` wrote: an older owner, or itself.

        What an owner of the same epoch wrote it leaves alone: it cannot know which of the two was replaced.
        """
        return writer.epoch < self.epoch or writer == self


UNOWNED = Fence(0, "")
"""The fence of a process that owns no role, and of files that a release without owners wrote."""
