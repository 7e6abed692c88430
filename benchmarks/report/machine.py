"""Owns what a result says of the machine on which it was measured.

Must not change how the machine works.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

VECTORS = ("avx2", "avx512f", "amx_tile")
CAPPED_BY = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that make libraries use fewer vector instructions than the processor has."""
ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """The processor, its cores and vector instructions, the load of the last minute, and the checkout's commit."""
    facts = _cpu_facts()
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "vectors": [name for name in VECTORS if name in flags],
        "capped by": {name: os.environ[name] for name in CAPPED_BY if name in os.environ},
        "load": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def _cpu_facts() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _commit() -> str:
    """The commit, with `+` if files were changed since; `unknown` outside a repository."""
    command = ["git", "describe", "--always", "--exclude", "*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
