"""Owns where Prometheus and promtool come from: PATH, else a folder into which Debian's package was unpacked.

Must not need root, nor change the system.

`python -m deploy.observability.tools FOLDER` fills the folder where that is needed and possible.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")
PACKAGE = "prometheus"
DOWNLOAD_S = 180.0
FOLDER = Path(sys.prefix) / "tools"
"""Where the Makefile puts the package."""


def find(program: str) -> Path | None:
    """The program on PATH or in FOLDER, or None."""
    found = shutil.which(program)
    unpacked = FOLDER / "usr" / "bin" / program
    return Path(found) if found else unpacked if unpacked.is_file() else None


class NotFetchedError(RuntimeError):
    """The package could not be had; the text says why."""


def _call(arguments: list[str], folder: Path) -> None:
    """Run a command in `folder`. Raises NotFetchedError."""
    if shutil.which(arguments[0]) is None:
        raise NotFetchedError(f"{arguments[0]} is not installed")
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise NotFetchedError(f"{arguments[0]} {arguments[-1]} took longer than {DOWNLOAD_S:g} s") from None
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise NotFetchedError(f"{arguments[0]} {arguments[-1]}: {told}")


def fetch(folder: Path) -> None:
    """Unpack Debian's package into `folder`. Raises NotFetchedError."""
    with tempfile.TemporaryDirectory(prefix="penstock-tools-") as name:
        scratch = Path(name)
        lists, cache = scratch / "lists" / "partial", scratch / "cache" / "archives" / "partial"
        lists.mkdir(parents=True)
        cache.mkdir(parents=True)
        own = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache={cache.parents[1]}", "-o", "APT::Sandbox::User="]
        try:
            _call(["apt-get", *own, "download", PACKAGE], scratch)
        except NotFetchedError:
            # The system's package lists may be absent, and are not ours to update.
            own += ["-o", f"Dir::State::Lists={lists.parent}"]
            _call(["apt-get", *own, "update"], scratch)
            _call(["apt-get", *own, "download", PACKAGE], scratch)
        [package] = scratch.glob("*.deb")
        _call(["dpkg-deb", "-x", str(package), str(folder)], scratch)


def main() -> int:
    """Always 0: where the programs cannot be had, tests that need them are skipped with this reason."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else FOLDER
    missing = [one for one in PROGRAMS if not shutil.which(one) and not (folder / "usr" / "bin" / one).is_file()]
    if missing:
        try:
            fetch(folder)
        except NotFetchedError as error:
            print(f"tools: no {' and '.join(missing)} ({error}); tests that need them are skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
