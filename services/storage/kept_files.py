"""Owns the user's files in a run's folder and in the store: written before its services start, and read without Redis.

Must not use a file that is not the one that was submitted.

    rewards/NAME             each file
    rewards/digests.json     the names and digests of all of them, written last
    differs-rewards/...      what was in the place of one, set aside; it is never read
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from services.contracts import REWARD_DIGESTS, RewardDigests
from services.storage.errors import MissingObjectError, StoreError
from services.storage.facts import FileFacts, facts_of, matches
from services.storage.mirror import Mirror

REWARDS, ASIDE = "rewards", "differs-rewards"
MARK_CHARACTERS = 12
"""Of a digest, in names and messages."""


def keep_files(folder: Path, mirror: Mirror, files: Mapping[str, str]) -> list[str]:
    """Write the texts of a run's files, by name (`./rewards.py`), to the run's `folder` and its store.

    May be repeated. What is in the place of a file and differs from it is set aside; returns one line for each. Raises
    StoreError, OSError.
    """
    contents = {_place(name): text.encode() for name, text in files.items()}
    contents[_place(REWARD_DIGESTS)] = RewardDigests.of(files).model_dump_json().encode()
    return [line for name, content in contents.items() for line in _kept(folder, mirror, name, content)]


def read_kept_files(folder: Path, mirror: Mirror) -> dict[str, str]:
    """The texts that `keep_files` has written, by name: from the folder or else the store; none if there are none.

    Raises StoreError, which names the file, for one that is missing or is not what was written.
    """
    try:
        listing = _read(folder, mirror, _place(REWARD_DIGESTS))
    except MissingObjectError:
        return {}
    where = _where(folder, mirror, _place(REWARD_DIGESTS))
    try:
        digests = RewardDigests.model_validate_json(listing).files
    except ValidationError:
        raise StoreError(f"{where}: damaged") from None
    return {name: _checked(folder, mirror, name, digest) for name, digest in digests.items()}


def _checked(folder: Path, mirror: Mirror, name: str, digest: str) -> str:
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise StoreError(f"{_where(folder, mirror, _place(REWARD_DIGESTS))}: names {name!r}, which is outside of it")
    content = _read(folder, mirror, _place(name))
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise StoreError(f"{_where(folder, mirror, _place(name))}: {_differs(found, digest)}")
    return content.decode()


def _kept(folder: Path, mirror: Mirror, name: str, content: bytes) -> Iterator[str]:
    wanted = FileFacts(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    if line := _kept_here(folder, name, content, wanted):
        yield line
    if mirror.remote and (line := _kept_in_store(folder, mirror, name, content, wanted)):
        yield line


def _kept_here(folder: Path, name: str, content: bytes, wanted: FileFacts) -> str:
    path, line = folder / name, ""
    if path.exists():
        if matches(path, wanted):
            return ""
        found = facts_of(path).sha256
        aside = folder / _aside(name, found)
        aside.parent.mkdir(parents=True, exist_ok=True)
        path.replace(aside)
        line = f"{path}: {_differs(found, wanted.sha256)}; it is now {aside}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return line


def _kept_in_store(folder: Path, mirror: Mirror, name: str, content: bytes, wanted: FileFacts) -> str:
    line = ""
    try:
        stored = mirror.read(name)
    except MissingObjectError:
        pass
    else:
        if stored == content:
            return ""
        found = hashlib.sha256(stored).hexdigest()
        mirror.put_bytes(_aside(name, found), stored)
        at = mirror.location(_aside(name, found), folder)
        line = f"{mirror.location(name, folder)}: {_differs(found, wanted.sha256)}; it is now {at}"
    mirror.put(name, folder / name)
    return line


def _read(folder: Path, mirror: Mirror, name: str) -> bytes:
    path = folder / name
    if path.is_file():
        return path.read_bytes()
    try:
        return mirror.read(name)
    except MissingObjectError:
        raise MissingObjectError(f"{_where(folder, mirror, name)}: missing") from None


def _where(folder: Path, mirror: Mirror, name: str) -> str:
    path = folder / name
    return str(path) if path.is_file() else mirror.location(name, folder)


def _place(name: str) -> str:
    """The path of a file in the run's folder."""
    return f"{REWARDS}/{name.removeprefix('./')}"


def _aside(name: str, digest: str) -> str:
    return f"{ASIDE}/{name.removeprefix(f'{REWARDS}/')}.{digest[:MARK_CHARACTERS]}"


def _differs(found: str, wanted: str) -> str:
    return (
        f"is not the file that the run was submitted with (SHA-256 {found[:MARK_CHARACTERS]}, expected "
        f"{wanted[:MARK_CHARACTERS]})"
    )
