"""Owns the record of which locked distribution owns which file, deploy/locks/NAME.owners.json beside each NAME.lock.

Must not download a wheel: of each one it reads the list of its files, by HTTP range requests. Must not run in an image.

`python -m deploy.images.inventory LOCK [uv's options for package sources]` writes the record, and fails if two
distributions own one file; `make lock` runs it. The package index is the one that uv is configured with.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec
from packaging.markers import default_environment
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock
from packaging.tags import Tag, compatible_tags, cpython_tags

from deploy.images.owners import ENVIRONMENT, inventory

PYTHON = (3, 11)
GLIBC = 36
"""The images' Python and glibc (2.36, Debian 12): the Dockerfile's base, and the installer's choice among wheels."""
OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
RESOLVE_S, BUILD_S = 300.0, 600.0
READERS = 8
BLOCK = 2**18
"""Bytes of one range request."""
OUTSIDE = re.compile(r"^[^/]+\.data/(?P<scheme>purelib|platlib|scripts|headers|data)/(?P<path>.+)$")

Contents = tuple[str, str, Mapping[str, str]]
"""An archive's name, its SHA-256, and path -> "checksum-size" of each file that it installs."""


class InventoryError(RuntimeError):
    """The record cannot be written. The text is one line for the user."""


def image_tags() -> list[Tag]:
    """The tags of the wheels that the images accept, best first."""
    platforms = []
    for minor in range(GLIBC, 4, -1):
        platforms.append(f"manylinux_2_{minor}_x86_64")
        if minor in OLD_NAMES:
            platforms.append(f"{OLD_NAMES[minor]}_x86_64")
    platforms.append("linux_x86_64")
    interpreter = f"cp{PYTHON[0]}{PYTHON[1]}"
    return [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, interpreter, platforms)]


def _uv(*arguments: str | Path, deadline_s: float) -> None:
    """Run uv. Raises InventoryError with the end of its message."""
    command = [str(Path(sys.executable).with_name("uv")), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InventoryError(f"uv {arguments[0]}: {error}") from None
    if done.returncode:
        raise InventoryError(f"uv {arguments[0]}: {done.stderr.strip()[-1000:]}")


def archives(lock: Path, sources: list[str], scratch: Path) -> Iterator[tuple[Package, PackageWheel | PackageSdist]]:
    """What an image installs of a lock: each package with the address of its wheel, or of its source if it has none.

    `sources`: uv's options for package sources. Raises InventoryError.
    """
    resolved = scratch / "pylock.toml"
    platform = ("--python-version", ".".join(map(str, PYTHON)), "--python-platform", f"x86_64-manylinux_2_{GLIBC}")
    form = ("--quiet", "--no-deps", "--no-header", "--format", "pylock.toml", "--output-file", resolved)
    _uv("pip", "compile", lock, *platform, *form, *sources, deadline_s=RESOLVE_S)
    packages = Pylock.from_dict(tomllib.loads(resolved.read_text(encoding="utf-8")))
    environment = default_environment()
    environment["python_version"] = f"{PYTHON[0]}.{PYTHON[1]}"
    environment["python_full_version"] = f"{PYTHON[0]}.{PYTHON[1]}.0"
    for package, archive in packages.select(tags=image_tags(), environment=environment):
        if not isinstance(archive, PackageWheel | PackageSdist) or not archive.url:
            raise InventoryError(
                f"{lock.name}: {package.name} is not valid: expected a wheel or a source with an address"
            )
        yield package, archive


@contextmanager
def opened(url: str) -> Iterator[IO[bytes]]:
    """A file or an address, read in blocks where a reader asks for them."""
    # Proxies and passwords of the environment apply, as they do for uv.
    options = {"client_kwargs": {"trust_env": True}, "block_size": BLOCK} if url.startswith("http") else {}
    with fsspec.open(url, "rb", cache_type="readahead", **options) as file:
        yield file


def installed_path(name: str) -> str:
    """Where a file of a wheel is installed."""
    found = OUTSIDE.match(name)
    if found is None or found["scheme"] in ("purelib", "platlib"):
        return found["path"] if found else name
    inside = f"lib/python{PYTHON[0]}.{PYTHON[1]}/site-packages/"
    if found["scheme"] == "data":
        path = found["path"]
        return path.removeprefix(inside) if path.startswith(inside) else ENVIRONMENT + path
    if found["scheme"] == "scripts":
        return f"{ENVIRONMENT}bin/{found['path']}"
    return f"{ENVIRONMENT}include/{name.split('-')[0]}/{found['path']}"


def installed_files(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Each file that a wheel installs -> "checksum-size"; the programs of its entry points are files, too."""
    files = {}
    for entry in wheel.infolist():
        if entry.is_dir():
            continue
        files[installed_path(entry.filename)] = f"{entry.CRC:08x}-{entry.file_size}"
        if re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", entry.filename):
            parsed = configparser.RawConfigParser(delimiters=("=",), strict=False)
            parsed.optionxform = str  # type: ignore[assignment,method-assign]
            parsed.read_string(wheel.read(entry).decode())
            for section in ("console_scripts", "gui_scripts"):
                for program, place in parsed[section].items() if parsed.has_section(section) else ():
                    files[f"{ENVIRONMENT}bin/{program}"] = place
    return files


def built(source: PackageSdist, build_lock: Path, scratch: Path) -> str:
    """The address of the wheel that is built from a source, with the locked build tools, as in the image."""
    assert source.url
    with opened(source.url) as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != source.hashes["sha256"]:
        raise InventoryError(f"{source.filename}: its SHA-256 is not the locked one")
    folder = scratch / source.filename.removesuffix(".gz")
    folder.mkdir()
    (folder / source.filename).write_bytes(content)
    constraints = ("--require-hashes", "--build-constraints", build_lock)
    _uv("build", "--quiet", "--wheel", *constraints, "--out-dir", folder, folder / source.filename, deadline_s=BUILD_S)
    return next(folder.glob("*.whl")).as_uri()


def contents(archive: PackageWheel | PackageSdist, build_lock: Path, scratch: Path) -> Contents:
    """What an archive installs. Raises InventoryError."""
    try:
        url = archive.url if isinstance(archive, PackageWheel) else built(archive, build_lock, scratch)
        assert url
        with opened(url) as file, zipfile.ZipFile(file) as wheel:
            return archive.filename, archive.hashes["sha256"], installed_files(wheel)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, configparser.Error) as error:
        raise InventoryError(f"{archive.filename}: cannot be read: {type(error).__name__}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Write the record of a lock; returns the exit status: 1 if two distributions own one file."""
    parser = argparse.ArgumentParser(prog="python -m deploy.images.inventory", allow_abbrev=False)
    parser.add_argument("lock", type=Path)
    parsed, sources = parser.parse_known_args(arguments)
    lock: Path = parsed.lock
    with tempfile.TemporaryDirectory(prefix="penstock-inventory-") as name, ThreadPoolExecutor(READERS) as readers:
        scratch = Path(name)
        try:
            selected = list(archives(lock, sources, scratch))
            read = readers.map(lambda found: contents(found[1], lock.with_name("build.lock"), scratch), selected)
            found = {
                f"{package.name}=={package.version}": content
                for (package, _), content in zip(selected, read, strict=True)
            }
        except InventoryError as error:
            print(f"inventory: {error}", file=sys.stderr)
            return 2
    recorded = inventory(found)
    recorded.write(lock.with_suffix(".owners.json"))
    files = sum(len(content[2]) for content in found.values())
    print(f"{lock.name}: {len(found)} distributions, {files} files")
    for fault in recorded.faults():
        print(f"{lock.name}: {fault}", file=sys.stderr)
    return 1 if recorded.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
