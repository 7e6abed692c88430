"""Owns the programs that tests need: their Debian packages, and their places, on PATH or unpacked by `make tools`.

Must not need root, or change the system.

`python -m tests.harness.programs [FOLDER]` downloads the programs that PATH lacks to the folder, if possible.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGES = {
    "busybox": "busybox-static",
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "dash": "dash",
    "kubectl": "kubernetes-client",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-cli": "redis-tools",
    "redis-server": "redis-server",
}
"""Program -> its Debian package."""
FETCHED = ("busybox", "bwrap", "prometheus", "promtool")
"""The programs that need only their own package: they run from the folder where it is unpacked."""
FOLDER = Path(sys.prefix) / "tools"
"""The folder into which the Makefile unpacks packages, each in a folder of its name."""
DOWNLOAD_S = 180.0


def find(program: str, folder: Path | None = None) -> Path | None:
    """The program on PATH, else in its unpacked package below `folder` (FOLDER by default), else None."""
    if found := shutil.which(program):
        return Path(found)
    # The folder differs between Debian releases.
    unpacked = ((folder or FOLDER) / PACKAGES[program] / name / program for name in ("usr/bin", "bin"))
    return next((path for path in unpacked if path.is_file()), None)


def missing(program: str) -> str:
    """How to install a missing program."""
    fetched = ", or `make tools` without root" if program in FETCHED else ""
    return f"{program} is not on PATH: apt-get install {PACKAGES[program]}{fetched}"


def needed(program: str) -> Path:
    """The program; if it is missing, the test is skipped with the name of its package."""
    found = find(program)
    if found is None:
        pytest.skip(missing(program))
    return found


def demanded(program: str) -> Path:
    """The program; if it is missing, the test fails with the name of its package."""
    found = find(program)
    assert found is not None, missing(program)
    return found


class NotFetchedError(RuntimeError):
    """A package could not be downloaded or unpacked; the text has the reason."""


def _call(arguments: list[str], folder: Path) -> None:
    """Run a command in `folder`. Raises NotFetchedError."""
    if shutil.which(arguments[0]) is None:
        raise NotFetchedError(f"{arguments[0]} is not installed")
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise NotFetchedError(f"{arguments[0]} {arguments[-1]} took longer than {DOWNLOAD_S:g} s") from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise NotFetchedError(f"{arguments[0]} {arguments[-1]}: {output}")


class _Apt:
    """apt-get, writing only to a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._lists = scratch, scratch / "lists"
        for partial in (self._lists / "partial", scratch / "cache" / "archives" / "partial"):
            partial.mkdir(parents=True)
        self._options = [
            "-o",
            "Debug::NoLocking=1",
            "-o",
            f"Dir::Cache={scratch / 'cache'}",
            "-o",
            "APT::Sandbox::User=",
            # A network that drops packets would delay every `make test` by minutes.
            "-o",
            "Acquire::http::Timeout=20",
            "-o",
            "Acquire::Retries=0",
        ]
        self._refused: NotFetchedError | None = None
        self._updated = False

    def download(self, package: str) -> Path:
        """The package's file. Raises NotFetchedError."""
        try:
            _call(["apt-get", *self._options, "download", package], self._scratch)
        except NotFetchedError:
            # The system's package lists may be missing or old, and must not be changed.
            self._update_once()
            _call(["apt-get", *self._options, "download", package], self._scratch)
        file = next(self._scratch.glob(f"{package}_*.deb"), None)
        if file is None:
            raise NotFetchedError(f"apt-get download {package} left no file {package}_*.deb")
        return file

    def _update_once(self) -> None:
        """Update the package lists once; a failure is raised again for each package, as NotFetchedError."""
        if not self._updated:
            self._updated = True
            self._options += ["-o", f"Dir::State::Lists={self._lists}"]
            try:
                _call(["apt-get", *self._options, "update"], self._scratch)
            except NotFetchedError as error:
                self._refused = error
        if self._refused is not None:
            raise self._refused


def _unpack(file: Path, target: Path) -> None:
    """Unpack a package completely or not at all: a partial one would look complete. Raises NotFetchedError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        content = Path(name) / "content"
        _call(["dpkg-deb", "-x", str(file), str(content)], Path(name))
        shutil.rmtree(target, ignore_errors=True)
        content.rename(target)


def fetch(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """Unpack Debian packages below `folder`; returns those that failed, each with the reason."""
    refused = {}
    with tempfile.TemporaryDirectory(prefix="penstock-tools-") as name:
        apt = _Apt(Path(name))
        for package in packages:
            try:
                _unpack(apt.download(package), folder / package)
            except (NotFetchedError, OSError) as error:
                refused[package] = str(error)
    return refused


def main() -> int:
    """Always returns 0: tests that need a missing program are skipped with a message."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else FOLDER
    absent = {program: PACKAGES[program] for program in FETCHED if find(program, folder) is None}
    if not absent:
        return 0
    for package, why in fetch(sorted(set(absent.values())), folder).items():
        programs = " and ".join(program for program, owner in absent.items() if owner == package)
        print(
            f"tools: no {programs}: install Debian's {package} ({why}); tests that need it are skipped", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
