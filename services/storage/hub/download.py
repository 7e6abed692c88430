"""Owns the program that downloads from the hub: `python -m services.storage.hub.download REQUEST`.

Must not run in a service's process: those are offline, and have no token. HF_TOKEN is in no text that it writes.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx2  # what huggingface_hub is built on
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from services.retry import Retry
from services.storage.errors import StoreError, StoreOutageError, harmless
from services.storage.facts import FileFacts, digest_of, facts_of
from services.storage.folders import MANIFEST, FolderManifest
from services.storage.hub.address import COMMIT, HubAddress
from services.storage.hub.request import DownloadAnswer, DownloadRequest
from services.storage.hub.selection import check_index, needed_files
from services.storage.mirror import exclusive

log = logging.getLogger("services.storage.hub.download")

R = TypeVar("R")

PARALLEL_FILES = 4
ATTEMPTS, PAUSE_S = 4, 1.0
"""The library repeats each request up to five times; after that, the whole is tried again from where it was."""
REQUEST_S = 30
OUTAGES = frozenset({408, 425, 429})
"""Beside all above 499: the statuses after which a later request may succeed."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
GIB = 2**30


class DamagedError(StoreOutageError):
    """A file arrived with another content than the hub lists. If it does so again and again, waiting does not help."""


def download(address: HubAddress, cache: Path) -> HubAddress:
    """Fetch the files of an address below `cache`, unless they are there; returns it with its commit and digest.

    Several processes may call it at once; of what an interrupted call left, the next one keeps the complete files.
    Raises StoreError, OSError.
    """
    at = address._replace(revision=_tried(address, lambda: _commit(address, cache)))
    place, partial = cache / at.folder, cache / f".{at.folder}.download"
    with exclusive(place):
        if not (place / at.name / MANIFEST).is_file():
            if constants.HF_HUB_OFFLINE:
                raise StoreError(f"HF_HUB_OFFLINE is set, and {cache} has no copy; download it with a connection first")
            _tried(address, lambda: _fetch(at, partial / at.name))
            partial.rename(place)
    manifest = FolderManifest.model_validate_json((place / at.name / MANIFEST).read_bytes())
    found = at._replace(digest=digest_of(manifest.files or {}))
    _remember(address, found, cache)
    return found


def resolve(address: HubAddress, cache: Path) -> HubAddress:
    """The address with its commit, without its files. Raises StoreError, OSError."""
    found = address._replace(revision=_tried(address, lambda: _commit(address, cache)))
    cache.mkdir(parents=True, exist_ok=True)
    _remember(address, found, cache)
    return found


def _commit(address: HubAddress, cache: Path) -> str:
    """The commit of the address's revision; offline, the one that was fetched last."""
    if COMMIT.fullmatch(address.revision):
        return address.revision
    if constants.HF_HUB_OFFLINE:
        remembered = _remembered(address, cache)
        if not remembered.is_file():
            raise StoreError(f"HF_HUB_OFFLINE is set, and {cache} has no copy; download it with a connection first")
        commit = remembered.read_text()
        log.warning("offline: %s is taken to be commit %s, as when it was fetched last", address, commit)
    else:
        info = HfApi().repo_info(
            address.repository, revision=address.revision, repo_type=address.kind, timeout=REQUEST_S
        )
        commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise StoreError("the hub's answer names no commit")
    return commit


def _remembered(address: HubAddress, cache: Path) -> Path:
    return cache / f".{address.folder}.commit"


def _remember(address: HubAddress, found: HubAddress, cache: Path) -> None:
    path = _remembered(address, cache)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(found.revision)
    partial.replace(path)


def _fetch(at: HubAddress, folder: Path) -> None:
    """Fetch all needed files to `folder`, check them, and write the manifest last."""
    tree = HfApi().list_repo_tree(at.repository, recursive=True, revision=at.revision, repo_type=at.kind)
    known = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    files = {name: known[name] for name in needed_files(at, known)}
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / ".cache").rglob("*.incomplete"):
        left.unlink()  # of a killed process; the library would start under another name
    size = sum(_size(file) for file in files.values())
    _check_room(files, folder)
    log.info("%s: %d files, %.2f GiB, to %s", at, len(files), size / GIB, folder)
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        facts = dict(zip(files, threads.map(lambda file: _fetch_file(at, file, folder), files.values()), strict=True))
    check_index(folder, files)
    (folder / MANIFEST).write_text(FolderManifest(files=facts).model_dump_json())
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes about its downloads


def _fetch_file(at: HubAddress, file: RepoFile, folder: Path) -> FileFacts:
    hf_hub_download(
        at.repository,
        file.path,
        repo_type=at.kind,
        revision=at.revision,
        local_dir=folder,
        etag_timeout=REQUEST_S,
    )
    path = folder / file.path
    facts = facts_of(path)
    if facts.size != _size(file) or not _is_content(file, facts, path):
        path.unlink()
        raise DamagedError(f"{file.path!r} arrived damaged: its size or digest is not the one that the hub lists")
    log.info("%s: %s, %.2f GiB", at, file.path, facts.size / GIB)
    return facts


def _size(file: RepoFile) -> int:
    return int(file.lfs.size if file.lfs else file.size)


def _is_content(file: RepoFile, facts: FileFacts, path: Path) -> bool:
    """Whether the file has the content that the hub lists: SHA-256 of large files, Git's SHA-1 of the others."""
    if file.lfs:
        return facts.sha256 == file.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == file.blob_id


def _check_room(files: dict[str, RepoFile], folder: Path) -> None:
    there = {name for name, file in files.items() if _has_size(folder / name, _size(file))}
    needed = sum(_size(file) for name, file in files.items() if name not in there)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(f"{folder.parent.parent} needs {needed / GIB:.2f} GiB for it, and has {free / GIB:.2f} free")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _tried(address: HubAddress, do: Callable[[], R]) -> R:
    """The result of requests to the hub; an outage is tried again. Raises StoreError for the library's errors."""

    def ask() -> R:
        try:
            return do()
        except StoreError:
            raise
        except Exception as error:
            if (fault := _translated(address, error)) is None:
                raise
            raise fault from None

    return Retry(lambda error: isinstance(error, StoreOutageError), PAUSE_S, attempts=ATTEMPTS).run(ask)


def _translated(address: HubAddress, error: BaseException) -> StoreError | None:
    """The library's error as a StoreError; None if it is not an error of the hub. Its own text may hold signed URLs."""
    hub, token = harmless(constants.ENDPOINT), "the token in HF_TOKEN" if get_token() else ""
    if isinstance(error, GatedRepoError):
        fault = f"{token} has no access to it" if token else "HF_TOKEN is not set"
        return StoreError(f"it is gated, and {fault}; set HF_TOKEN to a token with access")
    if isinstance(error, RepositoryNotFoundError):
        fault = f"{token} has no access to it" if token else "HF_TOKEN is not set"
        return StoreError(f"{hub} has no such {address.kind} repository, or it is private and {fault}")
    if isinstance(error, RevisionNotFoundError):
        return StoreError(f"it has no revision {address.revision!r}; expected a branch, a tag or a commit")
    if isinstance(error, HfHubHTTPError):
        return _of_status(hub, token, error.response.status_code)
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _translated(address, error.__cause__)  # the library looked for a copy after another error
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return StoreError("the disk is full; what has arrived is kept for the next attempt")
    if isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError):
        return None  # of a file
    # An OSError with a text alone is the library's: a file that arrived with another size. Xet raises RuntimeErrors.
    if isinstance(error, OSError | httpx2.HTTPError | RuntimeError | ValueError):
        return StoreOutageError(f"{hub} did not answer as expected ({type(error).__name__})")
    return None


def _of_status(hub: str, token: str, status: int) -> StoreError:
    if status >= 500 or status in OUTAGES:
        return StoreOutageError(f"{hub} cannot serve it now (status {status})")
    if status in (401, 403):
        return StoreError(f"{hub} rejects {token or 'a request without HF_TOKEN'} (status {status})")
    return StoreError(f"{hub} rejects the request (status {status}); HF_ENDPOINT must be the address of a hub")


class _Harmless(logging.Formatter):
    """Leaves out credentials in URLs, and the signatures of the servers that the hub redirects to."""

    def format(self, record: logging.LogRecord) -> str:
        return re.sub(r"\?[^\s'\"]+", "", harmless(super().format(record)))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Harmless("%(asctime)s %(levelname)s hub: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    library = logging.getLogger("huggingface_hub")
    library.handlers.clear()
    library.propagate = True


def main(argv: list[str]) -> int:
    """Do what the request asks; the answer is one line of JSON on standard output."""
    request = DownloadRequest.model_validate_json(argv[0])
    _log_to_stderr()
    try:
        found = (resolve if request.only_commit else download)(request.address, Path(request.cache))
        answer = DownloadAnswer(commit=found.revision, digest=found.digest)
    except OSError as error:
        outage = isinstance(error, StoreOutageError) and not isinstance(error, DamagedError)
        answer = DownloadAnswer(error=str(error), outage=outage)
    print(answer.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
