"""Owns `penstock bench data-plane`: what moving groups costs, beside redis-py, many pending groups and ended runs.

Real services around stub engines, on a real Valkey with `appendfsync always`, as shipped. Parts:

streams: the four stages of a group of 16 samples, one after the other, each service alone with a backlog of all groups
of a run: dispatched (sampler), generated (rollout replica, stub engine), judged (verifier, stub sandbox), recorded
(sampler). Against redis-py alone, which moves the same bytes with the same effects (XADD, HSET of payload, task and
verdict, HMGET of the text, XREADGROUP, XACK) in pipelines of 256 messages on one connection. Groups per second: 1 / the
sum of the stages' times for a group; a rate is measured between 5 % and 95 % of a backlog, without the start of a
process. MB/s: groups per second x the bytes that a group writes (task and verdicts twice, payloads and samples once).
The ratio is the same for both, because the bytes are. Target: at least 0.5.

pending: CPU time of the sampler and of Redis per group, while 100 to 100,000 groups are pending. Each group passes
through all that these do with a group that is filtered: dispatch, 16 verdicts, the decision, the release, the deletion
of its payloads; another group takes its place. What Redis does for replicas and verifiers does not count: those and the
sampler take turns of 100 groups, each stopped (SIGSTOP) while the other works. CPU time is what the scheduler counts of
all threads of both processes. Target: at most 1 ms per group; and flat: of a repeat's figures, the largest at most 1.5
times the smallest. From 100 to 100,000 groups, work that grows with the backlog would be multiplied by 1,000; a part of
5 ns per pending group would already miss the target. What may grow a little is the time to find a key among many, which
caches miss. Another figure, without a target, has the archive of groups too (limits.archive: all): tokens, texts and
verdicts are read, checked and written to Parquet files, at one backlog, because nothing of that depends on it.

ended: CPU time of one look of the controller, and of one answer of the API, in one process, medians of 100 (--times),
beside 0 to 5,000 runs that have ended; of Redis' own CPU time nothing. Target: at most 1.5 times that beside none, or
for a page that only many runs fill, beside 100. The list's part that grows with the runs would be multiplied by 50.

Must not need a model, a GPU or the network.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.api import ended_runs
from benchmarks.data_plane import backlog, pending, reference
from benchmarks.data_plane.backlog import SAMPLES
from benchmarks.data_plane.pending import Share
from benchmarks.data_plane.reference import Pace
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options, positive
from tests.harness.servers.redis_servers import start_server

NAME = "data-plane"
HALF, FLAT, MOST_MS = Target(least=0.5), Target(most=1.5), Target(most=1.0)
PENDING = (100, 1_000, 10_000, 100_000)
ENDED = (0, 100, 1_000, 5_000)


class Part(NamedTuple):
    """The result of one part, as in Report."""

    figures: list[Figure]
    panels: list[Panel]
    details: dict[str, Any]


class Moved(NamedTuple):
    """The streams of one repeat: the paces of both programs by stage, messages by stage, and bytes per group."""

    ours: Mapping[str, Pace]
    theirs: Mapping[str, Pace]
    counts: Mapping[str, int]
    group_bytes: float

    def cpu_s(self, paces: Mapping[str, Pace]) -> float:
        """CPU seconds of all messages, in client and server."""
        return sum(count * paces[name].cpu_s for name, count in self.counts.items())

    def groups_per_s(self, paces: Mapping[str, Pace]) -> float:
        """Groups per second through all stages, one after the other."""
        return self.counts["dispatched"] / sum(count / paces[name].per_s for name, count in self.counts.items())


def streams(folder: Path, given: argparse.Namespace) -> Part:
    """Groups and bytes per second through all streams, against redis-py."""
    moved = []
    for repeat in range(given.repeats):
        ours = backlog.measure(folder, f"streams-{repeat}", given.groups)
        assert ours.messages is not None
        with start_server(folder, "--appendfsync", "always") as server:
            theirs = reference.stages_of(ours.messages, server)
        moved.append(Moved(ours.paces, theirs, ours.counts, ours.messages.group_bytes(SAMPLES)))
    return of_streams(moved)


def of_streams(moved: Sequence[Moved]) -> Part:
    """The figures of the streams' repeats."""
    ours = [each.groups_per_s(each.ours) for each in moved]
    theirs = [each.groups_per_s(each.theirs) for each in moved]
    figures = [ratio("all streams / redis-py: groups/s and MB/s", ours, theirs, HALF)]
    for name, rates in (("Penstock", ours), ("redis-py", theirs)):
        megabytes = tuple(rate * each.group_bytes / 1e6 for rate, each in zip(rates, moved, strict=True))
        figures += [
            Figure(f"all streams, {name}", tuple(rates), "groups/s"),
            Figure(f"all streams, {name}", megabytes, "MB/s"),
        ]
    for stage in moved[0].ours:
        pairs = [(each.ours[stage].per_s, each.theirs[stage].per_s) for each in moved]
        figures.append(ratio(f"{stage} / redis-py", [own for own, _ in pairs], [other for _, other in pairs]))
    spent = ([each.cpu_s(each.theirs) for each in moved], [each.cpu_s(each.ours) for each in moved])
    figures.append(ratio("CPU time, redis-py / all streams", *spent))
    x = tuple(map(float, range(1, len(moved) + 1)))
    lines = (Series("Penstock", x, tuple(ours)), Series("redis-py", x, tuple(theirs)))
    details = {"group_bytes": [each.group_bytes for each in moved], "messages": dict(moved[0].counts)}
    return Part(figures, [Panel("all streams", "repeat", "groups/s", lines)], details)


def pending_groups(folder: Path, given: argparse.Namespace) -> Part:
    """CPU time of the sampler and of Redis per group, by the number of pending groups."""
    found = {size: pending.measure(folder, size, given.windows, given.repeats) for size in given.pending}
    least = min(given.pending)
    return of_pending(found, pending.measure(folder, least, given.windows, given.repeats, "all"))


def of_pending(found: Mapping[int, Sequence[Share]], archived: Sequence[Share]) -> Part:
    """The figures of each backlog's repeats, and of those with an archive at the smallest backlog."""
    figures = [
        Figure(f"CPU per group, {size:,} pending", tuple(share.total_ms for share in shares), "ms", MOST_MS)
        for size, shares in found.items()
    ]
    repeats = list(zip(*(figure.values for figure in figures), strict=True))
    spread = tuple(max(values) / min(values) for values in repeats)
    with_archive = tuple(share.total_ms for share in archived)
    figures += [
        Figure("CPU per group, largest / smallest of the backlogs", spread, target=FLAT),
        Figure(f"CPU per group with the archive, {min(found):,} pending", with_archive, "ms"),
    ]
    sizes, parts = tuple(map(float, found)), {}
    for name, value in (("sampler", "sampler_ms"), ("Redis", "server_ms"), ("both", "total_ms")):
        parts[name] = tuple(min(getattr(share, value) for share in shares) for shares in found.values())
    lines = tuple(Series(name, sizes, values) for name, values in parts.items())
    panel = Panel("CPU per group", "pending groups", "ms", lines, log="x")
    details = {str(size): [share._asdict() for share in shares] for size, shares in found.items()}
    return Part(figures, [panel], {"pending": details, "archived": [share._asdict() for share in archived]})


def ended(folder: Path, given: argparse.Namespace) -> Part:
    """CPU time of the controller's look and of the API's answers, by the number of ended runs."""
    repeats = []
    for repeat in range(given.repeats):
        (own := folder / f"ended-{repeat}").mkdir()
        repeats.append(asyncio.run(ended_runs.costs(own, given.ended, given.times)))
    return of_ended(repeats)


def of_ended(repeats: Sequence[Mapping[int, ended_runs.Cost]]) -> Part:
    """The figures of each repeat's costs by number of ended runs."""
    sizes = list(repeats[0])
    figures, lines = [], []
    for name in repeats[0][sizes[0]].ms:
        base = next((size for size in sizes if size >= ended_runs.PAGE), sizes[0])
        first = base if name in ended_runs.FILLED else sizes[0]
        least, most = ([costs[size].ms[name] for costs in repeats] for size in (first, sizes[-1]))
        figures += [
            ratio(f"{name}: beside {sizes[-1]:,} / {first:,} ended runs", most, least, FLAT),
            Figure(f"{name}: beside {sizes[-1]:,} ended runs", tuple(most), "ms CPU"),
        ]
        medians = [Figure(name, tuple(costs[size].ms[name] for costs in repeats)).median for size in sizes]
        lines.append(Series(name, tuple(map(float, sizes)), tuple(medians)))
    panel = Panel("controller and API", "ended runs", "ms CPU", tuple(lines))
    details = {"first_look_s": [{size: cost.first_look_s for size, cost in costs.items()} for costs in repeats]}
    return Part(figures, [panel], details)


PARTS: Mapping[str, Callable[[Path, argparse.Namespace], Part]] = {
    "streams": streams,
    "pending": pending_groups,
    "ended": ended,
}


def main(arguments: Sequence[str]) -> int:
    """`penstock bench data-plane`; the exit status."""
    parser = options(NAME, __doc__)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="only these parts")
    parser.add_argument("--groups", type=positive, default=896, help="of the streams' backlog (896)")
    parser.add_argument("--pending", type=positive, nargs="+", default=PENDING, help="backlogs of pending groups")
    parser.add_argument("--windows", type=positive, default=20, help="turns of 100 groups in each repeat (20)")
    parser.add_argument("--ended", type=int, nargs="+", default=ENDED, help="numbers of ended runs, rising")
    parser.add_argument("--times", type=positive, default=100, help="looks and requests whose median counts (100)")
    given = parser.parse_args(arguments)
    report = Report(NAME, [], [], {"parts": list(given.parts)})
    panels = []
    for name in given.parts:
        with tempfile.TemporaryDirectory(prefix="penstock-data-plane-") as folder:
            part = PARTS[name](Path(folder), given)
        report.figures += part.figures
        panels += part.panels
        report.details |= part.details
    report.panels = panels
    return report.finish(given.out)
