"""Owns the CPU time of a group in the sampler and in Redis, by the number of groups that are pending meanwhile.

Must not count what replicas and verifiers do: they and the sampler take turns, each stopped while the other works.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.data_plane.backlog import SAMPLES, STUB_VERIFIER
from benchmarks.data_plane.bench import Bench, ran_s

WINDOW = 100
"""Groups that are judged between two turns of the sampler: at the smallest backlog, all of them."""
NEVER_STARVES = {
    "dynamic_sampling": {"starvation": dict.fromkeys(("widen_after", "boundary_after", "partial_after", "pause_after"))}
}


class Share(NamedTuple):
    """CPU milliseconds per group in the sampler and in the server."""

    sampler_ms: float
    server_ms: float

    @property
    def total_ms(self) -> float:
        """Of both."""
        return self.sampler_ms + self.server_ms


def measure(folder: Path, pending: int, windows: int, repeats: int, archive: str = "none") -> list[Share]:
    """The cost of a group with `pending` groups pending, over `windows` windows of WINDOW groups, `repeats` times.

    All groups are filtered, so each one passes through dispatch, the record of 16 verdicts, the decision and the
    release, and another one takes its place. `archive`: limits.archive of the recipe; `all` archives each group.
    """
    limits = {"groups_per_step": pending, "max_inflight_groups": pending, "max_staleness": 0, "rollout_steps": 4}
    options: dict[str, Any] = {"algorithm": NEVER_STARVES, "archive": archive, **limits}
    with Bench(folder, f"pending-{pending}-{archive}", pending + 8 * WINDOW, **options) as bench:
        bench.start("sampler")
        bench.until(lambda: _open(bench) >= pending, f"{pending} groups dispatched")
        bench.start("learner")
        bench.start("rollout", "--filtered", "1.0")
        bench.start("verifier", program=STUB_VERIFIER)
        _window(bench, pending)  # the first one, in which all start
        bench.kill("learner")  # which published the version that is sampled
        return [_repeat(bench, pending, windows) for _ in range(repeats)]


def _open(bench: Bench) -> int:
    """How many groups are dispatched and not decided."""
    return bench.counter("dispatched") - bench.counter("judged")


def _repeat(bench: Bench, pending: int, windows: int) -> Share:
    judged = bench.counter("judged")
    spent = [_window(bench, pending) for _ in range(windows)]
    groups = bench.counter("judged") - judged
    sampler_s, server_s = (sum(part) for part in zip(*spent, strict=True))
    return Share(1000 * sampler_s / groups, 1000 * server_s / groups)


def _window(bench: Bench, pending: int) -> tuple[float, float]:
    """CPU seconds of the sampler and of the server, while the sampler works off the verdicts of WINDOW groups."""
    bench.signal("sampler", signal.SIGSTOP)
    wanted = SAMPLES * (bench.counter("judged") + WINDOW)
    for service in ("rollout", "verifier"):
        bench.signal(service, signal.SIGCONT)
    bench.until(lambda: bench.entries("verdicts") >= wanted, f"{wanted} verdicts")
    for service in ("rollout", "verifier"):
        bench.signal(service, signal.SIGSTOP)
    verdicts = bench.entries("verdicts")
    before = [ran_s(pid) for pid in (bench.pid("sampler"), bench.pid("valkey"))]
    bench.signal("sampler", signal.SIGCONT)
    bench.until(lambda: bench.acked("verdicts") >= verdicts and _open(bench) >= pending, "the refill")
    after = [ran_s(pid) for pid in (bench.pid("sampler"), bench.pid("valkey"))]
    sampler_s, server_s = (late - early for early, late in zip(before, after, strict=True))
    return sampler_s, server_s
