"""Owns what a process and the program that downloads from the hub tell each other.

Must not connect to anything.
"""

from __future__ import annotations

from services.contracts import Value
from services.storage.hub.address import HubAddress, Kind


class DownloadRequest(Value):
    """What to download; `cache` is the folder in which the copy's folder belongs.

    `only_commit`: find the commit of the revision, and download nothing.
    """

    kind: Kind
    repository: str
    revision: str
    path: str
    cache: str
    only_commit: bool = False

    @property
    def address(self) -> HubAddress:
        """The address of the files."""
        return HubAddress(self.kind, self.repository, self.revision, self.path)


class DownloadAnswer(Value):
    """The commit and the digest of the files, or what failed; `outage`: a later attempt may succeed."""

    commit: str = ""
    digest: str = ""
    error: str = ""
    outage: bool = False
