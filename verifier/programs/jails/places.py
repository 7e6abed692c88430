"""Owns the places of a jail: what of this machine's files a program can read, and the Python that runs it.

Must not list a file that could hold a secret, or a program besides Python.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from verifier.programs.inside import supervisor  # imported here too: a jail cannot write its byte code

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of the package verifier."""
JAILED_PACKAGE = Path("/penstock")
SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
MODULES = ("__init__.py", "programs/__init__.py", "programs/inside")
"""What runs in a jail, below the package verifier."""
PROC_KEPT = frozenset(
    (
        "self",
        "thread-self",
        "mounts",
        "net",
        "cpuinfo",
        "meminfo",
        "stat",
        "loadavg",
        "uptime",
        "version",
        "filesystems",
    )
)
"""What of /proc, besides processes, is not covered: the rest is about the host, and root could write some of it."""
BOOTSTRAP = f"from {supervisor.__name__} import main; main()"


def python() -> Path:
    """The interpreter that the virtual environment was made from: a jail has no virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def readable() -> list[Path]:
    """The existing files and folders that a program may read: Python's and the system's libraries."""
    wanted = [*map(Path, SYSTEM), Path(sys.base_prefix, "lib"), python()]
    present = [path for path in wanted if path.exists()]
    inner = {path for path in present for other in present if path != other and other in path.parents}
    return [path for path in present if path not in inner]


def arguments() -> list[str]:
    """The command of the supervisor: without site packages, the caller's environment, or byte code written."""
    return [str(python()), "-P", "-s", "-S", "-B", "-c", BOOTSTRAP]


def environment(package: Path) -> dict[str, str]:
    """All variables of a program's processes; `package`: the folder that holds the package verifier.

    The seed makes a verdict repeatable where a program prints a set.
    """
    return {
        "PYTHONPATH": str(package),
        "PYTHONHOME": sys.base_prefix,
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "HOME": "/tmp",
        "PATH": os.devnull,
        "TZ": "UTC",
    }


def covered_in_proc() -> tuple[list[str], list[str]]:
    """The folders and the files of /proc that are covered."""
    names = sorted(name for name in os.listdir("/proc") if not name.isdecimal() and name not in PROC_KEPT)
    paths = [f"/proc/{name}" for name in names if not os.path.islink(f"/proc/{name}")]
    return [path for path in paths if os.path.isdir(path)], [path for path in paths if not os.path.isdir(path)]
