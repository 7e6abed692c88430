"""Owns the connection to an S3-compatible store: single objects in, out, listed and deleted.

Must not know their content, nor log a credential. The only importer of obstore: pyarrow's S3 needs chunked requests,
which many compatible servers reject, and its copy_files ignores an upload that failed.
Endpoint, region and credentials come from AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN; without keys, the credentials are those of the pod's service account or the machine's role.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from services.retry import Retry
from services.storage.errors import MissingObjectError, StoreError, StoreOutageError, harmless
from services.storage.places import StoreAddress

log = logging.getLogger(__name__)

R = TypeVar("R")

CONNECT_S, REQUEST_S = 5, 30
"""Longest time for a connection, and for one request with its response; a big object takes many requests."""
ATTEMPTS, PAUSE_S = 2, 1.0
"""Attempts of a whole operation, and the pause between them in seconds; the library retries each request once."""
PART_BYTES = 16 << 20
MOST_PARTS = 9000
"""S3 allows at most 10000 parts per object."""
PARALLEL = 8
SLOWEST_BYTES_PER_S = 1 << 20
"""A slower transfer of a whole object in one request is aborted."""
DELETED_AT_ONCE = 1000
KEYS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
MACHINE_ROLE = "169.254.169.254"
REJECTED = re.compile(r"status code: 4(?!08|09|29)\d\d")
STALLED = "<Code>RequestTimeout</Code>"
"""With status 400: an upload was too slow, and a retry helps. After RequestTimeTooSkewed, a wrong clock, none does."""


class Found(NamedTuple):
    """An object: its size in bytes, and the store's tag of its content."""

    size: int
    tag: str


class _WholeOnlyError(StoreError):
    """The server does not support requests for a part of an object."""


class UploadCancelledError(RuntimeError):
    """An upload was cancelled, because its process is about to stop."""


def endpoint() -> str:
    """The store's endpoint, for messages, without credentials."""
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return harmless(given) if given else "the AWS endpoint of AWS_REGION"


def put_bytes(at: StoreAddress, content: bytes) -> None:
    """Put an object, whole or not at all. Raises StoreError."""
    import obstore

    _tried(f"{at} could not be written", lambda: obstore.put(_bucket(at), at.key, content))


def put_file(at: StoreAddress, path: Path, stop: threading.Event | None = None) -> None:
    """Put a file, whole or not at all.

    Raises StoreError, OSError of the file, UploadCancelledError once `stop` is set.
    """
    import obstore

    size = path.stat().st_size
    if size <= PART_BYTES:
        put_bytes(at, path.read_bytes())
        return
    part = max(PART_BYTES, -(-size // MOST_PARTS))

    def put() -> None:
        chunks, failed = _chunks(path, part, stop), list[Exception]()
        try:
            content = _noting(chunks, failed)
            obstore.put(_bucket(at), at.key, content, use_multipart=True, chunk_size=part, max_concurrency=PARALLEL)
        except Exception:
            if failed:  # an error of the file, or a cancellation; the library would report it as the store's
                raise failed[0] from None
            raise

    _tried(f"{at} could not be written", put)


def _chunks(path: Path, size: int, stop: threading.Event | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(size):
            if stop is not None and stop.is_set():
                raise UploadCancelledError(f"{path}: its upload was cancelled")
            yield chunk


def _noting(chunks: Iterator[bytes], failed: list[Exception]) -> Iterator[bytes]:
    try:
        yield from chunks
    except Exception as error:
        failed.append(error)
        raise


def get_bytes(at: StoreAddress) -> bytes:
    """An object's content. Raises MissingObjectError, StoreError."""
    import obstore

    return _tried(f"{at} could not be read", lambda: bytes(obstore.get(_bucket(at), at.key).bytes()))


def get_file(at: StoreAddress, size: int, path: Path) -> None:
    """Write an object of `size` bytes to `path`, several parts at once.

    Raises MissingObjectError, StoreError, OSError of the file.
    """
    with path.open("wb") as file:
        if size <= PART_BYTES:
            written = file.write(get_bytes(at))
        else:
            try:
                written = _get_parts(at, size, file)
            except _WholeOnlyError:
                written = _get_whole(at, size, file)
    if written != size:
        raise StoreError(f"{at} could not be read: it has {written} bytes now, not {size}")


def get_part(at: StoreAddress, start: int, size: int) -> bytes:
    """`size` bytes of an object from `start`. Raises MissingObjectError, StoreError."""
    import obstore

    ask = partial(obstore.get_range, _bucket(at), at.key, start=start, length=size)
    try:
        return bytes(_tried(f"{at} could not be read", ask))
    except _WholeOnlyError:  # some servers answer so to a part that is the whole
        found = head(at)
        if found is None or found.size > PART_BYTES:
            raise
        return get_bytes(at)[start : start + size]


def _get_parts(at: StoreAddress, size: int, file: BinaryIO) -> int:
    starts = range(0, size, PART_BYTES)
    written = _get_part(at, starts[0], size, file.fileno())  # shows whether the server supports parts
    with ThreadPoolExecutor(PARALLEL) as threads:
        return written + sum(threads.map(lambda start: _get_part(at, start, size, file.fileno()), starts[1:]))


def _get_part(at: StoreAddress, start: int, size: int, file: int) -> int:
    import obstore

    wanted = min(PART_BYTES, size - start)
    ask = partial(obstore.get_range, _bucket(at), at.key, start=start, length=wanted)
    part, written = memoryview(_tried(f"{at} could not be read", ask)), 0
    while written < len(part):
        written += os.pwrite(file, part[written:], start + written)
    return written


def _get_whole(at: StoreAddress, size: int, file: BinaryIO) -> int:
    """For servers that do not support requests for a part."""
    import obstore

    bucket = _bucket(at, round(REQUEST_S + size / SLOWEST_BYTES_PER_S))

    def stream() -> int:
        file.seek(0)
        return sum(file.write(chunk) for chunk in obstore.get(bucket, at.key).stream(min_chunk_size=PART_BYTES))

    return _tried(f"{at} could not be read", stream)


def head(at: StoreAddress) -> Found | None:
    """An object's size and tag; None if there is none. Raises StoreError."""
    import obstore

    try:
        found = _tried(f"{at} could not be looked up", lambda: obstore.head(_bucket(at), at.key))
    except MissingObjectError:
        return None
    return Found(found["size"], str(found["e_tag"]).strip('"'))


def listed(below: StoreAddress) -> dict[str, Found]:
    """The objects whose keys start with `below` and a `/`, by the rest of the key, in order. Raises StoreError."""
    import obstore

    def list_all() -> dict[str, Found]:
        found = (entry for page in obstore.list(_bucket(below), below.key or None) for entry in page)
        skipped = len(below.key) + 1 if below.key else 0
        return {entry["path"][skipped:]: Found(entry["size"], str(entry["e_tag"]).strip('"')) for entry in found}

    return dict(sorted(_tried(f"{below} could not be listed", list_all).items()))


def folders(below: StoreAddress) -> list[str]:
    """The first parts of all keys below an address that have more parts, without listing what they hold."""
    import obstore

    def list_once() -> list[str]:
        found = obstore.list_with_delimiter(_bucket(below), below.key or None)["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found)

    return _tried(f"{below} could not be listed", list_once)


def delete(below: StoreAddress, names: Iterable[str]) -> None:
    """Delete objects by their names below an address; missing ones count as deleted. Raises StoreError."""
    import obstore

    keys = [(below / name).key for name in names]
    for start in range(0, len(keys), DELETED_AT_ONCE):
        batch = keys[start : start + DELETED_AT_ONCE]
        _tried(f"{below} could not be deleted", partial(obstore.delete, _bucket(below), batch))


def _bucket(at: StoreAddress, request_s: int | None = None) -> Any:
    variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    return _connected(at.bucket, variables, REQUEST_S if request_s is None else request_s)


@lru_cache(maxsize=8)
def _connected(bucket: str, variables: tuple[tuple[str, str], ...], request_s: int) -> Any:
    """One connection pool per bucket; `variables` are those that the library reads, so that a change takes effect."""
    from obstore.store import S3Store

    named = dict(variables)
    own = named.get("AWS_ENDPOINT_URL_S3") or named.get("AWS_ENDPOINT_URL") or ""
    client = {
        "connect_timeout": f"{CONNECT_S}s",
        "timeout": f"{request_s}s",
        "allow_http": own.startswith("http://"),
    }
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=2 * request_s)}
    return S3Store(bucket, client_options=client, retry_config=retries)  # type: ignore[arg-type]


def _tried(what: str, do: Callable[[], R]) -> R:
    """The result of a request; an outage is tried again. Raises StoreError."""

    def ask() -> R:
        try:
            return do()
        except UploadCancelledError:
            raise
        except Exception as error:
            if (fault := _translated(what, error)) is None:
                raise
            raise fault from None

    outages = Retry(lambda error: isinstance(error, StoreOutageError), PAUSE_S, attempts=ATTEMPTS)
    return outages.run(ask)


def _translated(what: str, error: Exception) -> StoreError | None:
    """The library's error as a StoreError; None if it is not an error of the store."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    if not isinstance(error, BaseError | FileNotFoundError):
        return None
    text, here = str(error), endpoint()
    if "non-partial response" in text:
        return _WholeOnlyError(f"{what}: {here} does not support requests for a part of an object")
    if "NoSuchBucket" in text:
        return StoreError(f"{what}: there is no such bucket at {here}")
    if isinstance(error, FileNotFoundError) and "Object at location" in text:
        return MissingObjectError(f"{what}: there is no such object at {here}")
    if isinstance(error, FileNotFoundError):
        return None
    rejected = isinstance(error, PermissionDeniedError | UnauthenticatedError) or REJECTED.search(text)
    if rejected and STALLED not in text:
        return StoreError(f"{what}: {here} rejects the request ({_response(text)}); {KEYS} must allow it")
    if MACHINE_ROLE in text:
        return StoreError(f"{what}: no credentials: {KEYS} are not set, and this machine has no role")
    return StoreOutageError(f"{what}: {here} did not respond as expected ({_response(text)})")


def _response(text: str) -> str:
    """The server's response, or else the library's error, in one line."""
    answer = [match for tag in ("Code", "Message") for match in re.findall(f"<{tag}>([^<]*)</{tag}>", text)]
    first = text.split("\n", 1)[0].rpartition(" - ")[2]
    return harmless(": ".join(answer) or first)[:300]
