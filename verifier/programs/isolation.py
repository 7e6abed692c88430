"""Owns the choice of the isolation that this machine can give to programs, and the command that starts a jail.

Must not choose one that was not tried: each candidate runs a program that attempts what a jail must prevent.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from verifier.programs.inside.encoding import decode, loads
from verifier.programs.jails.frames import FrameError, packed, unpacked
from verifier.programs.jails.places import (
    DEVICES,
    JAILED_PACKAGE,
    MODULES,
    PACKAGE,
    arguments,
    covered_in_proc,
    environment,
    readable,
)
from verifier.programs.jails.seccomp import FilterError, filter_program
from verifier.programs.limits import ProgramLimits

BWRAP_VARIABLE = "PENSTOCK_BWRAP"
UNPRIVILEGED = 65534
PROBE_S = 30.0
OWN_COUNTS = (5, 14)
"""From this Linux on, RLIMIT_NPROC counts the processes of a user namespace, not all of the user."""
SYSLOG_READ_ALL = 3
LOG_BYTES = 1 << 16


class Isolation(StrEnum):
    """How a program is kept from the machine."""

    BUBBLEWRAP = "bubblewrap"
    NSJAIL = "nsjail"
    GVISOR = "gvisor"


class IsolationError(Exception):
    """This machine can isolate no program; one line, with what was tried and why each failed."""


@dataclass(frozen=True)
class IsolationChoice:
    """An isolation that this machine has. `program`: what starts a jail. `user`: whom root becomes before, if anyone.

    `alone`: a jail has its own process ids, so that the end of its first process is the end of all.
    """

    isolation: Isolation
    program: str = ""
    user: int | None = None

    @property
    def alone(self) -> bool:
        """Whether a jail has its own process ids."""
        return self.isolation is not Isolation.GVISOR

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments of a subprocess that give it the choice's user."""
        return {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}

    def command(self, limits: ProgramLimits, report: int) -> list[str]:
        """The command of a jail. bubblewrap writes the id of the jail's first process into the descriptor `report`."""
        return COMMANDS[self.isolation](self.program, limits, report)

    def first_frame(self, source: str, before: str, limits: ProgramLimits, folder: str) -> bytes:
        """What the supervisor reads first. `before` runs before `source`; `folder`: the writable one without a jail."""
        wanted = limits.for_supervisor()
        counted = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= OWN_COUNTS
        if self.alone and counted:
            wanted["resources"]["RLIMIT_NPROC"] = limits.processes + 2  # the supervisor, and one to exceed the limit
        return packed(
            {
                "source": source,
                "before": before,
                "limits": wanted,
                "filter": filter_program(signals=self.alone).hex(),
                "alone": self.alone,
                "readable": [*map(str, readable()), *DEVICES[1:], *([str(JAILED_PACKAGE)] if self.alone else [])],
                "folders": ["/tmp", "/dev/shm"] if self.alone else [folder],
            }
        )


def _bubblewrap(program: str, limits: ProgramLimits, report: int) -> list[str]:
    size = ["--size", str(limits.tmp_mib << 20)]
    folders, files = covered_in_proc()
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    command += ["--uid", str(UNPRIVILEGED), "--gid", str(UNPRIVILEGED), "--hostname", "jail", "--clearenv"]
    command += ["--info-fd", str(report)]
    for name, value in environment(JAILED_PACKAGE).items():
        command += ["--setenv", name, value]
    for place in readable():
        linked = _is_root_link(place)
        command += ["--symlink" if linked else "--ro-bind", os.readlink(place) if linked else str(place), str(place)]
    for module in MODULES:
        command += ["--ro-bind", f"{PACKAGE / module}", f"{JAILED_PACKAGE / PACKAGE.name / module}"]
    command += ["--proc", "/proc", "--tmpfs", "/dev", *size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp"]
    for path in folders:
        command += ["--tmpfs", path, "--remount-ro", path]
    for path in files:
        command += ["--ro-bind", os.devnull, path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *arguments()]


def _is_root_link(path: Path) -> bool:
    """Whether it is, as /lib often is, a relative link to a folder that is bound as well."""
    return path.is_symlink() and os.readlink(path).startswith("usr/")


def _nsjail(program: str, limits: ProgramLimits, report: int) -> list[str]:
    command = [program, "--mode", "o", "--really_quiet", "--user", str(UNPRIVILEGED), "--group", str(UNPRIVILEGED)]
    command += ["--hostname", "jail", "--cwd", "/tmp", "--time_limit", str(int(limits.wall_s) + 60)]
    for name in ("as", "core", "cpu", "fsize", "nofile", "nproc", "stack"):
        command += [f"--rlimit_{name}", "hard"]  # the supervisor sets the limits of a program's processes
    for name, value in environment(JAILED_PACKAGE).items():
        command += ["--env", f"{name}={value}"]
    for path in (*readable(), *DEVICES):
        command += ["--bindmount_ro" if str(path) not in DEVICES else "--bindmount", str(path)]
    for module in MODULES:
        command += ["--bindmount_ro", f"{PACKAGE / module}:{JAILED_PACKAGE / PACKAGE.name / module}"]
    for folder in ("/tmp", "/dev/shm"):
        command += ["--mount", f"none:{folder}:tmpfs:size={limits.tmp_mib << 20}"]
    return [*command, "--", *arguments()]


def _plain(program: str, limits: ProgramLimits, report: int) -> list[str]:
    return arguments()


COMMANDS: dict[Isolation, Callable[[str, ProgramLimits, int], list[str]]] = {
    Isolation.BUBBLEWRAP: _bubblewrap,
    Isolation.NSJAIL: _nsjail,
    Isolation.GVISOR: _plain,
}
"""By isolation: the command that starts the supervisor, isolated."""


@cache
def find_isolation() -> IsolationChoice:
    """The first isolation that works here: bubblewrap, nsjail, or gVisor around this process.

    Blocks for up to 30 s at the first call. Raises IsolationError.
    """
    refused = []
    for candidate in _candidates():
        if isinstance(candidate, str):
            refused.append(candidate)
            continue
        why = probed(candidate)
        if not why:
            return candidate
        user = "" if candidate.user is None else f" as user {candidate.user}"
        refused.append(f"{candidate.isolation}{user}: {why}")
    raise IsolationError(f"no isolation for programs on this machine: {'; '.join(refused)}"[:1000])


def _candidates() -> Iterator[IsolationChoice | str]:
    """What could work, the best first; a text for what is missing."""
    jails = {
        Isolation.BUBBLEWRAP: os.environ.get(BWRAP_VARIABLE) or shutil.which("bwrap"),
        Isolation.NSJAIL: shutil.which("nsjail"),
    }
    for isolation, program in jails.items():
        if not program:
            yield f"{isolation}: not on PATH"
            continue
        if os.geteuid() == 0:  # the kernel exempts root from limits, even in a user namespace
            yield IsolationChoice(isolation, program, UNPRIVILEGED)
        yield IsolationChoice(isolation, program)
    yield IsolationChoice(Isolation.GVISOR) if inside_gvisor() else "gVisor: this process does not run in it"


def inside_gvisor() -> bool:
    """Whether gVisor's kernel runs this process: its log, which it shows to every user, begins with its name."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "klogctl"):
        return False
    log = ctypes.create_string_buffer(LOG_BYTES)
    count = libc.klogctl(SYSLOG_READ_ALL, log, LOG_BYTES)
    return count > 0 and b"Starting gVisor" in log.raw[:count].split(b"\n")[0]


PROBE = """
import os, socket

def attempt(action):
    try:
        action()
        return True
    except OSError:
        return False

def succeeded():
    attempts = {
        "a socket": lambda: socket.socket(),
        "a file outside of its folder": lambda: open("/usr/lib/written", "w"),
        "the environment of its supervisor": lambda: open(f"/proc/{os.getppid()}/environ").read(),
        "a user namespace": lambda: os.unshare(os.CLONE_NEWUSER) if hasattr(os, "unshare") else open("/nowhere"),
        "another program": lambda: os.execv("/bin/sh", ["sh"]),
    }
    return [name for name, action in attempts.items() if attempt(action)]
"""


def probed(choice: IsolationChoice) -> str:
    """Why an isolation does not work here; '' if it does."""
    limits = ProgramLimits(cpu_s=5, wall_s=PROBE_S / 2)
    case = {"kind": "values", "setup": "", "expressions": ["succeeded()"], "arguments": None}
    try:
        with open(os.devnull, "w") as unread, tempfile.TemporaryDirectory(prefix="penstock-program-") as folder:
            done = subprocess.run(
                choice.command(limits, unread.fileno()),
                input=choice.first_frame(PROBE, "", limits, folder) + packed(case),
                capture_output=True,
                timeout=PROBE_S,
                env=environment(PACKAGE.parent),
                cwd="/",
                pass_fds=[unread.fileno()],
                **choice.identity,
            )
        *_, answer = unpacked(done.stdout)
        succeeded = decode(loads(answer["result"])[0])
        if not isinstance(succeeded, list):
            return f"a program in it gave {answer}"[:300]
    except FrameError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"it ended with status {done.returncode}")[:300]
    except (OSError, FilterError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return f"a program in it could reach: {', '.join(succeeded)}" if succeeded else ""
