"""Owns folders in a store: put with a manifest that comes last, and fetched whole, once a node.

Must not know what a folder is for.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from services.contracts import Value
from services.storage import objects
from services.storage.errors import StoreError
from services.storage.facts import FileFacts, facts_of, matches
from services.storage.mirror import alone, partial_of
from services.storage.objects import Found
from services.storage.places import StoreAddress, parse_address

MANIFEST = ".penstock.json"
MARK = re.compile(r"(?P<address>s3://.+)#(?P<content>[0-9a-f]{16})")
PARALLEL_FILES = 4


class FolderManifest(Value):
    """What a folder that Penstock has put holds, by name below it; None until all of it is there."""

    files: dict[str, FileFacts] | None


def put_folder(at: StoreAddress, folder: Path) -> None:
    """Put all files of a folder; until its manifest is there, last of all, it does not count. Replaces an earlier one.

    Raises StoreError, OSError.
    """
    objects.put_bytes(at / MANIFEST, FolderManifest(files=None).model_dump_json().encode())
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, path in files.items():
        objects.put_file(at / name, path)
    former = objects.listed(at).keys() - files.keys() - {MANIFEST}
    objects.delete(at, sorted(former))
    manifest = FolderManifest(files={name: facts_of(path) for name, path in files.items()})
    objects.put_bytes(at / MANIFEST, manifest.model_dump_json().encode())


def marked(text: str, found: dict[str, Found]) -> str:
    """An address with a mark of its `contents`, so that all who fetch it get the same."""
    return f"{text.rstrip('/')}#{_mark(found)}"


def contents(at: StoreAddress, field: str) -> dict[str, Found]:
    """The files below an address, or under "" the one object that it names. Raises StoreError where there is none."""
    found = {name: one for name, one in objects.listed(at).items() if not name.endswith("/")}
    if not found and at.key and (single := objects.head(at)):
        return {"": single}
    if not found:
        raise StoreError(f"{field}: value '{at}' is not accepted (nothing is there); an object or a folder of some is")
    return found


def local_copy(text: str, field: str, cache: Path) -> Path:
    """The folder or file that an address names, fetched into `cache` unless it is there; `field` is named in errors.

    An address with a mark is not even looked up once it is there, and refused where it holds something else by now.
    Safe while other processes do the same. Raises StoreError, OSError.
    """
    match = MARK.fullmatch(text)
    at = parse_address(match["address"] if match else text, field)
    name = at.key.rpartition("/")[2] or at.bucket
    if match and (kept := _place(cache, at, match["content"]) / name).exists():
        return kept
    found = contents(at, field)
    content = _mark(found)
    if match and match["content"] != content:
        raise StoreError(f"{field}: {at} holds something else than when the run began; put it back, or begin a new run")
    place = _place(cache, at, content)
    with alone(place):
        if not (place / name).exists():
            with _partial(place) as partial:
                _fetch(at, found, partial / name)
                if _mark(contents(at, field)) != content:
                    raise StoreError(f"{field}: {at} was changed while it was fetched; leave it as it is meanwhile")
                _check(at, partial / name)
                _put_in_place(partial, place, name)
    return place / name


def _place(cache: Path, at: StoreAddress, content: str) -> Path:
    """Of its own for each address and content, so that what is there is whole."""
    return cache / f"s3-{hashlib.sha256(f'{at}#{content}'.encode()).hexdigest()[:16]}"


def _mark(found: dict[str, Found]) -> str:
    lines = sorted(f"{name}\t{one.size}\t{one.tag}" for name, one in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, always the same one: what a killed process left there is deleted."""
    partial = partial_of(place)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, place: Path, name: str) -> None:
    """Rename into place; whoever comes second, where a lock does not reach other machines, keeps the first's folder."""
    try:
        partial.rename(place)
    except OSError:
        if not (place / name).exists():
            raise


def _fetch(at: StoreAddress, found: dict[str, Found], to: Path) -> None:
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        list(threads.map(lambda one: _fetch_file(at, one, found[one].size, to / one), found))


def _fetch_file(at: StoreAddress, name: str, size: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    objects.get_file(at / name if name else at, size, path)


def _check(at: StoreAddress, folder: Path) -> None:
    """What Penstock has put must be as it was then; what others have put comes without a word on that."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        files = FolderManifest.model_validate_json(path.read_bytes()).files
    except ValidationError:
        raise StoreError(f"{at / MANIFEST}: damaged") from None
    if files is None:
        raise StoreError(f"{at}: not whole: its upload has not come to its end")
    for name, facts in files.items():
        if not (folder / name).is_file():
            raise StoreError(f"{at / name}: missing")
        if not matches(folder / name, facts):
            raise StoreError(f"{at / name}: damaged (its content does not match {MANIFEST})")
