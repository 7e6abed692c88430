"""Owns who owns which installed file: each distribution's files in short form, and the files that two of them own.

Must not read a wheel; deploy.images.inventory does. Paths are relative to site-packages; those outside start with
`{environment}/`. A path that ends with a slash is a folder of which one distribution owns everything.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ENVIRONMENT = "{environment}/"

ALIKE = {
    "opencensus/__init__.py": "a namespace package: the same line in both distributions",
    "opencensus/common/__init__.py": "a namespace package: the same line in both distributions",
}
"""Files that several distributions own, with equal contents -> why that is harmless."""
UNUSED = {
    "build_backend.py": "builds each distribution from its own source; nothing imports the installed file",
}
"""Files that several distributions own, with different contents -> why that is harmless."""


@dataclass(frozen=True)
class LockedDistribution:
    """A locked distribution: the archive that the image installs, and what it owns, as paths and folders."""

    archive: str
    sha256: str
    owns: tuple[str, ...]


@dataclass(frozen=True)
class Inventory:
    """What one lock installs.

    `distributions`: "name==version" -> distribution. `shared`: path -> each owner's "checksum-size" of its content.
    """

    distributions: Mapping[str, LockedDistribution]
    shared: Mapping[str, Mapping[str, str]]

    def write(self, path: Path) -> None:
        """Write it as JSON; equal inventories give equal bytes."""
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Inventory:
        """What `write` wrote. Raises OSError, ValueError, KeyError, TypeError for any other file."""
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {
            name: LockedDistribution(entry["archive"], entry["sha256"], tuple(entry["owns"]))
            for name, entry in document["distributions"].items()
        }
        return cls(found, document["shared"])

    def collisions(self) -> dict[str, tuple[str, ...]]:
        """Path -> the distributions that own it, where there are several. It does not matter which are harmless."""
        return collisions({name: found.owns for name, found in self.distributions.items()})

    def faults(self) -> list[str]:
        """A line for each file with several owners that is neither in ALIKE, with equal contents, nor in UNUSED."""
        lines = []
        for path, owners in self.collisions().items():
            if path in UNUSED:
                continue
            contents = set(self.shared.get(path, {}).values())
            if path not in ALIKE:
                lines.append(f"{path}: {' and '.join(owners)} own it")
            elif len(contents) != 1:
                lines.append(f"{path}: {' and '.join(owners)} own it, with different contents")
        return lines


def above(path: str) -> Iterator[str]:
    """The folders above a path, outermost first, each with a slash at its end."""
    steps = path.rstrip("/").split("/")
    return ("/".join(steps[:depth]) + "/" for depth in range(1, len(steps)))


def shortened(files: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Each distribution's files, with the outermost folder in place of files where no other one owns any file there.

    What `collisions` finds in the result are the files that `files` gives to several distributions, or a file that
    another one has as a folder.
    """
    listed = {name: sorted(set(paths)) for name, paths in files.items()}
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for name, paths in listed.items():
        for path in paths:
            owners[path].add(name)
            for folder in above(path):
                owners[folder].add(name)

    def outermost(path: str, name: str) -> str:
        return next((folder for folder in above(path) if owners[folder] == {name}), path)

    return {name: tuple(dict.fromkeys(outermost(path, name) for path in paths)) for name, paths in listed.items()}


def collisions(owned: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Path -> the sorted names of its owners, where there are several; `owned` as `shortened` returns it."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for name, paths in owned.items():
        for path in paths:
            owners[path.rstrip("/")].add(name)
    found = {}
    for path, names in sorted(owners.items()):
        holders = names.union(*(owners.get(folder.rstrip("/"), ()) for folder in above(path)))
        if len(holders) > 1:
            found[path] = tuple(sorted(holders))
    return found


def inventory(contents: Mapping[str, tuple[str, str, Mapping[str, str]]]) -> Inventory:
    """The inventory of "name==version" -> (archive, SHA-256, path -> "checksum-size" of its content)."""
    owned = shortened({name: files for name, (_, _, files) in contents.items()})
    shared = {
        path: {name: contents[name][2][path] for name in names if path in contents[name][2]}
        for path, names in collisions(owned).items()
    }
    distributions = {
        name: LockedDistribution(archive, sha256, owned[name]) for name, (archive, sha256, _) in contents.items()
    }
    return Inventory(distributions, shared)
