"""Owns where files are: the folder of runs on this node, and addresses in an S3-compatible store.

Must not read or write any of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from services.storage.errors import StoreError

STORE = "PENSTOCK_STORE"
SCHEME = "s3://"
SHARED_FOLDERS = frozenset({"inputs", "models", "replays"})
"""Folders beside those of the runs, which no run may have as its own."""
ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<key>.*))?")


class StoreAddress(NamedTuple):
    """An address in a store: a bucket, and a key or a key prefix that ends before a `/`."""

    bucket: str
    key: str

    def __truediv__(self, name: str) -> StoreAddress:
        """The address of `name` below this one."""
        return StoreAddress(self.bucket, f"{self.key}/{name}".strip("/"))

    def __str__(self) -> str:
        """As `s3://BUCKET/KEY`."""
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")


def is_remote(text: str | None) -> bool:
    """Whether a path of a recipe is in a store."""
    return text is not None and text.startswith(SCHEME)


def parse_address(text: str, field: str) -> StoreAddress:
    """The address that `text`, the value of `field`, gives. Raises StoreError, which names both."""
    match = ADDRESS.fullmatch(text)
    if match is None:
        raise StoreError(f"{field}: {text!r} is not valid: expected s3://BUCKET/PREFIX")
    return StoreAddress(match["bucket"], (match["key"] or "").strip("/"))


def configured_store() -> StoreAddress | None:
    """The store that PENSTOCK_STORE names; None if unset, when the runs folder itself is durable. Raises StoreError."""
    given = os.environ.get(STORE)
    return parse_address(given, STORE) if given else None


def runs_folder() -> Path:
    """The folder of the runs' files on this node: PENSTOCK_RUNS, by default ./runs; absolute."""
    return Path(os.environ.get("PENSTOCK_RUNS", "runs")).absolute()
