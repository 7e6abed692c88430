"""Owns a folder that has a few of the installed distributions, with what they require, and no other.

Must not install anything: the folder contains links. `python -S` with the folder in PYTHONPATH finds nothing else.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(names: tuple[str, ...]) -> dict[str, Distribution]:
    """The distributions `names` and all that they require, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = distribution(name)
        wanted = map(Requirement, found[name].requires or [])
        waiting += [part.name for part in wanted if part.marker is None or part.marker.evaluate({"extra": ""})]
    return found


def link(folder: Path, names: tuple[str, ...]) -> Path:
    """Link them into `folder`."""
    for found in required(names).values():
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source, target = Path(str(found.locate_file(top))), folder / top
            if source.exists() and not target.exists():
                target.symlink_to(source)
    return folder
