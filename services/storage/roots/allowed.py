"""Owns below which folders and buckets a recipe may name files: PENSTOCK_ROOTS, or what a laptop allows.

Must not open a file; it only resolves links, and looks whether a file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from services.storage.errors import StoreError
from services.storage.places import (
    SCHEME,
    SHARED_FOLDERS,
    StoreAddress,
    configured_store,
    is_remote,
    parse_address,
    runs_folder,
)

VARIABLE = "PENSTOCK_ROOTS"
BESIDE = "./"
"""What the name of a file begins with that travels with a run, beside its recipe."""
SEPARATOR = re.compile(r",|:(?!//)")
"""A comma, or the colon of search paths, which is not that of `s3://`."""
SYSTEM = tuple(map(Path, ("/etc", "/proc", "/sys", "/dev", "/boot", "/run", "/var/run")))
"""Never allowed, whatever the roots are: the machine's own files, its devices and its processes' memory."""
FACTS, GROUPS, EXPORT = "run.json", "groups", "export"
"""What makes a folder below the runs folder that of a run: facts, or an archive of groups. And what others may read."""
OF_FACTS = re.compile(r"run(\.[^/]*)?\.json")
"""Its facts, as each of its learners found them."""
OF_A_RUN = frozenset(
    {
        *("summary.json", "rewards", "differs-rewards", "batches", "records", "failures", "checkpoints", GROUPS),
        *("logs", "payloads", "mlflow", "wandb"),
    }
)
"""What a run's folder holds that no other run may read, as its facts; its export it may."""
MOST_CHARACTERS, SHOWN_CHARACTERS = 4096, 200
"""Of a path: the most that a system takes, and what errors show of it."""
ROOT = f"absolute folders outside of {', '.join(map(str, SYSTEM))}, and s3://BUCKET/PREFIX addresses"
ABSOLUTE = "an absolute path: a relative one begins at the recipe's folder, which only `penstock submit` knows"


class RootsError(ValueError):
    """The value of PENSTOCK_ROOTS cannot be used; one line."""


class PathFaultError(ValueError):
    """A path that no recipe may name. The text says what is expected, and nothing of a file's content."""


class AllowedRoots(NamedTuple):
    """What a recipe may name. `folders`: their links are resolved; `stores`: None allows all buckets.

    The runs folder and the platform's own store are always allowed, except what `OF_A_RUN` lists.
    """

    folders: tuple[Path, ...]
    stores: tuple[StoreAddress, ...] | None
    runs: Path
    store: StoreAddress | None

    def __str__(self) -> str:
        """The roots, for errors; without a runs folder that this machine does not have."""
        runs = (self.runs,) if os.path.exists(self.runs) else ()
        own = () if self.store is None else (self.store,)
        buckets = ("any s3://BUCKET",) if self.stores is None else (*self.stores, *own)
        return ", ".join(map(str, dict.fromkeys((*self.folders, *runs, *buckets))))

    def resolved(self, text: str) -> Path:
        """The place of a path with all links resolved, whether or not it exists. Raises PathFaultError."""
        check_form(text)
        place = Path(os.path.realpath(text))
        if not self._allows(place):
            raise PathFaultError(f"a path below one of {self} ({VARIABLE}), where no name starts with a dot")
        if self.runs.is_relative_to(place):
            raise PathFaultError(f"a folder that does not hold the runs folder, {self.runs}")
        if place.is_relative_to(self.runs) and _of_a_run(place.relative_to(self.runs).parts, self.runs):
            raise PathFaultError(f"of another run only its export, {self.runs}/RUN/export")
        return place

    def exporter(self, text: str) -> str | None:
        """The run whose export a path names, or a part of it; None: no run's. Raises PathFaultError."""
        if is_remote(text):
            parts = _below_store(self.address(text), self.store)
        else:
            place = self.resolved(text)
            parts = place.relative_to(self.runs).parts if place.is_relative_to(self.runs) else ()
        return parts[0] if len(parts) > 1 and parts[1] == EXPORT and parts[0] not in SHARED_FOLDERS else None

    def is_here(self, place: Path) -> bool:
        """Whether this machine has the root of a resolved place, so that what it lacks below does not exist."""
        return any(os.path.exists(root) for root in self._roots if place.is_relative_to(root))

    def address(self, text: str) -> StoreAddress:
        """The address of a path in a store. Raises PathFaultError."""
        check_form(text)
        try:
            at = parse_address(text, "")
        except StoreError:
            raise PathFaultError("s3://BUCKET/PREFIX") from None
        if not self._allows_address(at):
            raise PathFaultError(f"an address below one of {self} ({VARIABLE})")
        if self.store is not None and _below(self.store, at) is not None:
            raise PathFaultError(f"an address that does not hold all runs, {self.store}")
        if _of_a_run(_below_store(at, self.store)):
            raise PathFaultError(f"of another run only its export, {self.store}/RUN/export")
        return at

    @property
    def _roots(self) -> tuple[Path, ...]:
        return (self.runs, *self.folders)

    def _allows(self, place: Path) -> bool:
        if any(place.is_relative_to(system) for system in SYSTEM) or place.is_relative_to(self.runs / ".stack"):
            return False
        below = (place.relative_to(root).parts for root in self._roots if place.is_relative_to(root))
        return any(not any(part.startswith(".") for part in parts) for parts in below)

    def _allows_address(self, at: StoreAddress) -> bool:
        if self.stores is None:
            return True
        return any(_below(at, root) is not None for root in (*self.stores, *filter(None, [self.store])))


def check_form(text: str) -> None:
    """Check a path as text. Raises PathFaultError for one that no system takes, or that leaves the folder it names."""
    if not text or len(text) > MOST_CHARACTERS:
        raise PathFaultError(f"a path of 1 to {MOST_CHARACTERS} characters (it has {len(text)})")
    if "\0" in text:
        raise PathFaultError("a path without NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PathFaultError("a path that can be written as UTF-8") from None
    if ".." in text.removeprefix(SCHEME).split("/"):
        raise PathFaultError("a path without `..`")


def fault_text(field: str, text: str, expected: object) -> str:
    """The error for a path, the value of `field`: the same form for all, the value cut to SHOWN_CHARACTERS."""
    return f"{field}: {text[:SHOWN_CHARACTERS]!r} is not valid: expected {expected}"


def load_roots() -> AllowedRoots:
    """The roots that PENSTOCK_ROOTS lists; if it is unset, the home, the working directory and all buckets.

    The working directory is that of `penstock up`, which its processes share. Raises RootsError, StoreError.
    """
    given, runs, store = os.environ.get(VARIABLE), Path(os.path.realpath(runs_folder())), configured_store()
    if given is None:
        return AllowedRoots(tuple(dict.fromkeys(_of_a_laptop())), None, runs, store)
    listed = [entry.strip() for entry in SEPARATOR.split(given) if entry.strip()]
    stores = [_parsed(entry) for entry in listed if is_remote(entry)]
    folders = [_folder(entry) for entry in listed if not is_remote(entry)]
    return AllowedRoots(tuple(dict.fromkeys(folders)), tuple(dict.fromkeys(stores)), runs, store)


def _of_a_laptop() -> Iterator[Path]:
    """The user's home and the working directory, without those that no root may be, and hidden ones of the home."""
    home, here = (Path(os.path.realpath(place)) for place in (os.path.expanduser("~"), "."))
    if _is_root(home):
        yield home
    hidden = here.is_relative_to(home) and any(part.startswith(".") for part in here.relative_to(home).parts)
    if _is_root(here) and not hidden:
        yield here


def _is_root(place: Path) -> bool:
    return place != Path("/") and not any(place.is_relative_to(system) for system in SYSTEM)


def _folder(entry: str) -> Path:
    try:
        check_form(entry)
    except PathFaultError as error:
        raise RootsError(fault_text(VARIABLE, entry, error)) from None
    place = Path(os.path.realpath(entry))
    if not os.path.isabs(entry) or not _is_root(place):
        raise RootsError(fault_text(VARIABLE, entry, f"{ROOT}, none of them / itself"))
    return place


def _parsed(entry: str) -> StoreAddress:
    try:
        check_form(entry)
        return parse_address(entry, VARIABLE)
    except (PathFaultError, StoreError):
        raise RootsError(fault_text(VARIABLE, entry, ROOT)) from None


def _below(at: StoreAddress, root: StoreAddress) -> tuple[str, ...] | None:
    """The parts of an address below a root; None if it is elsewhere."""
    wanted, found = _parts(root), _parts(at)
    return found[len(wanted) :] if at.bucket == root.bucket and found[: len(wanted)] == wanted else None


def _parts(at: StoreAddress) -> tuple[str, ...]:
    return tuple(at.key.split("/")) if at.key else ()


def _of_a_run(parts: Sequence[str], runs: Path | None = None) -> bool:
    """Whether a place below the runs folder `runs`, or the store, is what no other run may read."""
    if not parts or parts[0] in SHARED_FOLDERS:
        return False
    if len(parts) > 1 and (parts[1] in OF_A_RUN or OF_FACTS.fullmatch(parts[1])):
        return True
    shared = len(parts) > 1 and parts[1] == EXPORT
    # A tracker's folder has any name.
    return runs is not None and not shared and any((runs / parts[0] / name).exists() for name in (FACTS, GROUPS))


def _below_store(at: StoreAddress, store: StoreAddress | None) -> tuple[str, ...]:
    return (_below(at, store) if store is not None else None) or ()
