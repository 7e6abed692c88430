"""Tests that the chart's seccomp profile lets bubblewrap isolate programs, and that the denials of runtimes do not.

Must not test what a jail prevents; tests/verifier/programs does.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.harness.each import each
from tests.harness.programs import needed
from tests.helm.rendering import CHART, ROOT, Document
from verifier.programs.isolation import BWRAP_VARIABLE

PROFILE = CHART / "files" / "seccomp" / "verifier-code.json"
RUN_S = 90.0
NAMESPACES = 0x7E020000
FIND = """
import json, sys
import pyseccomp
filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for rule in json.load(sys.stdin):
    for name in rule["names"]:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        arguments = [pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag) for flag in rule.get("flags", [])]
        if number >= 0:
            for argument in arguments or [None]:
                filter.add_rule(pyseccomp.ERRNO(rule["errnoRet"]), number, *([argument] if argument else []))
filter.load()
from verifier.programs.isolation import IsolationError, find_isolation
try:
    print(find_isolation().isolation)
except IsolationError as error:
    print(error)
"""
"""A process that applies a profile to itself, as a container's runtime does, and looks for an isolation."""


def profile() -> Document:
    return dict(json.loads(PROFILE.read_text(encoding="utf-8")))


def found_under(rules: list[Document]) -> str:
    """The isolation that is found under these rules, or why there is none."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), BWRAP_VARIABLE: str(needed("bwrap"))}
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        input=json.dumps(rules),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=True,
        env=environment,
    )
    return done.stdout.strip()


OF_RUNTIMES: list[Document] = [
    {"names": ["unshare", "mount", "umount2", "pivot_root", "setns"], "errnoRet": errno.EPERM},
    {
        "names": ["clone"],
        "errnoRet": errno.EPERM,
        "flags": [1 << bit for bit in range(32) if NAMESPACES >> bit & 1],
    },
    {"names": ["clone3"], "errnoRet": errno.ENOSYS},
]
"""What of bubblewrap's calls containerd's and CRI-O's default profiles deny to a container without capabilities."""


def test_bubblewrap_works_under_the_charts_profile() -> None:
    if found_under([]) != "bubblewrap":
        pytest.skip("bubblewrap does not work on this machine")
    assert found_under(profile()["syscalls"]) == "bubblewrap"
    assert "bubblewrap: bwrap: No permissions to create" in found_under(OF_RUNTIMES)


def test_the_profile_denies_what_neither_jail_nor_ray_needs() -> None:
    rules = profile()
    assert rules["defaultAction"] == "SCMP_ACT_ALLOW"
    denied = {name for rule in rules["syscalls"] for name in rule["names"]}
    assert {"ptrace", "bpf", "keyctl", "io_uring_setup", "userfaultfd", "perf_event_open", "setns"} <= denied
    assert not {"clone", "unshare", "mount", "umount2", "pivot_root", "seccomp"} & denied


@each("rule", lambda: profile()["syscalls"], called=lambda rule: f"{len(rule['names'])} calls")
def test_each_rule_denies_with_an_error(rule: Document) -> None:
    """EPERM, or for calls whose arguments no filter sees ENOSYS: libraries then use the older call."""
    assert rule["action"] == "SCMP_ACT_ERRNO"
    assert rule["errnoRet"] == (errno.ENOSYS if rule["names"] == ["clone3"] else errno.EPERM)
    assert rule["names"] == sorted(set(rule["names"]))
