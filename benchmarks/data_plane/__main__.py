"""Owns the command line: `python -m benchmarks.data_plane [steady] [streams] [latency] [idle] [rewind]` prints each.

Must not judge: a target stands beside each figure. All five take about twelve minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.data_plane import backlog, idle, reference, rewind, steady
from benchmarks.data_plane.reference import Pace
from tests.harness.servers.redis_servers import start_server

TARGETS = {"verdicts": 5000, "streams": 0.5, "call_ms": 100}
PENDING = (0, 1_000, 10_000)


def show_steady(folder: Path, given: argparse.Namespace) -> None:
    """CPU per group of 16 small samples."""
    cost = steady.measure(folder, given.seconds, given.fsync)
    shares = ", ".join(f"{name} {1000 * spent:.1f}" for name, spent in sorted(cost.cpu_s.items()))
    print(f"CPU per group of 16 small samples: {1000 * cost.total_s:.1f} ms ({shares}), ", end="")
    print(f"at {cost.groups_per_s:.0f} groups/s")


def show_streams(folder: Path, given: argparse.Namespace) -> None:
    """All streams together against redis-py's own pipelined rate for the same bytes."""
    ours = backlog.measure(folder, "streams", given.groups, fsync=given.fsync)
    assert ours.messages is not None
    with start_server(folder, "--appendfsync", given.fsync) as server:
        theirs = reference.stages_of(ours.messages, server)
    print(
        f"{'stage':12}{'ours/s':>8}{'redis-py/s':>12}{'ratio':>7}{'ours CPU us':>13}{'redis-py CPU us':>17}{'ratio':>7}"
    )
    for name, pace in ours.paces.items():
        _compare(name, pace, theirs[name])
    sums = [reference.together(paces, ours.counts) for paces in (ours.paces, theirs)]
    _compare("together", sums[0], sums[1], f"  (target: {TARGETS['streams']})")


def _compare(name: str, ours: Pace, theirs: Pace, note: str = "") -> None:
    print(f"{name:12}{ours.per_s:8.0f}{theirs.per_s:12.0f}{ours.per_s / theirs.per_s:7.2f}", end="")
    print(f"{1e6 * ours.cpu_s:13.0f}{1e6 * theirs.cpu_s:17.0f}{theirs.cpu_s / ours.cpu_s:7.2f}{note}")


def show_latency(folder: Path, given: argparse.Namespace) -> None:
    """The same stages with latency in both directions."""
    found = backlog.measure(folder, "latency", given.groups, given.latency_ms, given.fsync)
    print(f"with {given.latency_ms:g} ms between client and server, each way:")
    for name, pace in found.paces.items():
        target = f"  (target: {TARGETS['verdicts']} verdicts/s)" if name == "recorded" else ""
        print(f"{name:12}{pace.per_s:8.0f}/s{target}")


def show_idle(folder: Path, given: argparse.Namespace) -> None:
    """An idle turn of the sampler by pending groups."""
    print(
        f"{'pending':>8}{'sampler ms/turn':>17}{'server ms/turn':>16}{'of a core':>11}   the same after half a minute"
    )
    for pending in PENDING:
        fresh, later = idle.measure(folder, pending, given.seconds, given.fsync)
        print(f"{pending:8}{fresh.sampler_ms:17.2f}{fresh.server_ms:16.2f}{fresh.share:11.1%}", end="   ")
        print(f"{later.sampler_ms:.2f}, {later.server_ms:.2f}, {later.share:.1%}", flush=True)


def show_rewind(folder: Path, given: argparse.Namespace) -> None:
    """The longest call of a rewind."""
    print(f"{given.rewind_groups} pending groups of {rewind.SAMPLES}; target: no call above {TARGETS['call_ms']:g} ms")
    for name, part in rewind.measure(folder, given.rewind_groups, given.fsync).items():
        at_most = f"{part.longest_ms:.0f} ms: {part.call}" if part.call else f"below {part.longest_ms:.0f} ms"
        print(f"{name:12}{part.seconds:8.1f} s, longest call {at_most}")


PARTS: Mapping[str, Callable[[Path, argparse.Namespace], None]] = {
    "steady": show_steady,
    "streams": show_streams,
    "latency": show_latency,
    "idle": show_idle,
    "rewind": show_rewind,
}


def main() -> None:
    """Measure the parts that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_plane", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--groups", type=int, default=896, help="of 16 samples, in the backlogs of streams and latency")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window of steady and idle")
    parser.add_argument("--rewind-groups", type=int, default=50_000)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--fsync", choices=("always", "everysec", "no"), default="always", help="the server's")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"parts: {sorted(unknown)} is not valid: expected some of {', '.join(PARTS)}")
    print(f"{os.cpu_count()} cores, {platform.machine()}, appendfsync {given.fsync}; load {os.getloadavg()[0]:.1f}")
    for name, part in PARTS.items():
        if not given.parts or name in given.parts:
            started = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="penstock-data-plane-") as folder:
                part(Path(folder), given)
            print(f"[{name}: {time.monotonic() - started:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
