"""Owns folders in a store: put with a manifest that is written last, and fetched whole, once per node.

Must not know what a folder is for.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from services.contracts import Value
from services.storage import objects
from services.storage.errors import StoreError
from services.storage.facts import FileFacts, facts_of, matches
from services.storage.mirror import exclusive, partial_of
from services.storage.objects import Found
from services.storage.places import StoreAddress, configured_store, parse_address
from services.storage.roots.allowed import FACTS, GROUPS

MANIFEST = ".penstock.json"
MARK = re.compile(r"(?P<address>s3://.+)#(?P<content>[0-9a-f]{16})")
PARALLEL_FILES = 4


class FolderManifest(Value):
    """The files of a folder that Penstock has put, by name below it; None until all of them are uploaded."""

    files: dict[str, FileFacts] | None


def put_folder(at: StoreAddress, folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Put all files of a folder, and its manifest last: without it the folder is not whole. Replaces an older folder.

    `check` is called before each write, and stops the upload with what it raises. Raises StoreError, OSError.
    """
    check()
    objects.put_bytes(at / MANIFEST, FolderManifest(files=None).model_dump_json().encode())
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, path in files.items():
        check()
        objects.put_file(at / name, path)
    check()
    obsolete = objects.listed(at).keys() - files.keys() - {MANIFEST}
    objects.delete(at, sorted(obsolete))
    manifest = FolderManifest(files={name: facts_of(path) for name, path in files.items()})
    check()
    objects.put_bytes(at / MANIFEST, manifest.model_dump_json().encode())


def marked(text: str, found: dict[str, Found]) -> str:
    """An address with a mark of its `contents`, so that every process that fetches it gets the same content."""
    return f"{text.rstrip('/')}#{_mark(found)}"


def contents(at: StoreAddress, field: str) -> dict[str, Found]:
    """The files below an address by name; for the address of one object, only that, under the name "".

    Raises StoreError if there is none.
    """
    found = {name: entry for name, entry in objects.listed(at).items() if not name.endswith("/")}
    if not found and at.key and (single := objects.head(at)):
        return {"": single}
    if not found:
        raise StoreError(f"{field}: '{at}' is not valid: expected an object or a folder of objects, found none")
    return found


def local_copy(text: str, field: str, cache: Path) -> Path:
    """The folder or file at an address, fetched into `cache` unless it is there; errors name `field`.

    An address with a mark needs no request once it has been fetched, and is rejected if its content has changed.
    Several processes may fetch the same address at once. Raises StoreError, OSError.
    """
    match = MARK.fullmatch(text)
    at = parse_address(match["address"] if match else text, field)
    name = at.key.rpartition("/")[2] or at.bucket
    if match and (kept := _place(cache, at, match["content"]) / name).exists():
        return kept
    found = contents(at, field)
    of_a_run = FACTS in found or any(file.startswith(f"{GROUPS}/") for file in found)
    if of_a_run and (store := configured_store()) and at == store / name:
        raise StoreError(f"{field}: '{at}' is not valid: expected of another run only its export, {at / 'export'}")
    content = _mark(found)
    if match and match["content"] != content:
        raise StoreError(f"{field}: {at} has changed since the run started; restore it, or submit a new run")
    place = _place(cache, at, content)

    def check() -> None:
        if _mark(contents(at, field)) != content:
            raise StoreError(f"{field}: {at} changed while it was fetched; do not write to it while a run starts")

    _fetch_once(at, found, place, name, check)
    return place / name


def add_folder(at: StoreAddress, folder: Path) -> bool:
    """Put a folder with its manifest, whose files never change, at an address that stands for them. False: it is there.

    Unlike put_folder, several processes may do so at once: what they write is equal. Raises StoreError, OSError.
    """
    if objects.head(at / MANIFEST):
        return False
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in [*(name for name in names if name != MANIFEST), MANIFEST]:
        objects.put_file(at / name, folder / name)
    return True


def fetch_folder(at: StoreAddress, place: Path, name: str) -> None:
    """Fetch a folder that `add_folder` has put to `name` in `place`, unless it is there, or not whole in the store.

    Raises StoreError, OSError.
    """
    found = objects.listed(at)
    if MANIFEST in found:
        _fetch_once(at, found, place, name)


def _fetch_once(
    at: StoreAddress, found: dict[str, Found], place: Path, name: str, check: Callable[[], None] = lambda: None
) -> None:
    """Fetch to `name` in `place` what was `found`, unless it is there; `check` is called before it is put in place."""
    with exclusive(place):
        if not (place / name).exists():
            with _partial(place) as partial:
                _fetch(at, found, partial / name)
                check()
                _check(at, partial / name)
                _put_in_place(partial, place, name)


def _place(cache: Path, at: StoreAddress, content: str) -> Path:
    """One place per address and content, so that a place that exists is whole."""
    return cache / f"s3-{hashlib.sha256(f'{at}#{content}'.encode()).hexdigest()[:16]}"


def _mark(found: dict[str, Found]) -> str:
    lines = sorted(f"{name}\t{entry.size}\t{entry.tag}" for name, entry in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, always the same one; what a killed process left in it is deleted."""
    partial = partial_of(place)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, place: Path, name: str) -> None:
    """Rename into place. If another machine was first, where a lock does not span machines, its folder is kept."""
    try:
        partial.rename(place)
    except OSError:
        if not (place / name).exists():
            raise


def _fetch(at: StoreAddress, found: dict[str, Found], to: Path) -> None:
    with ThreadPoolExecutor(PARALLEL_FILES) as threads:
        list(threads.map(lambda name: _fetch_file(at, name, found[name].size, to / name), found))


def _fetch_file(at: StoreAddress, name: str, size: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    objects.get_file(at / name if name else at, size, path)


def _check(at: StoreAddress, folder: Path) -> None:
    """A folder that Penstock has put must match its manifest; others have none."""
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        files = FolderManifest.model_validate_json(path.read_bytes()).files
    except ValidationError:
        raise StoreError(f"{at / MANIFEST}: damaged") from None
    if files is None:
        raise StoreError(f"{at}: incomplete: its upload has not finished")
    for name, facts in files.items():
        if not (folder / name).is_file():
            raise StoreError(f"{at / name}: missing")
        if not matches(folder / name, facts):
            raise StoreError(f"{at / name}: damaged (its content does not match {MANIFEST})")
