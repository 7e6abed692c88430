"""Owns the benchmark of weight publications: `penstock bench weights`.

How fast does a policy version reach every replica, against raw Gloo, and what does a request see of it?

Transfer. The learner's publisher, rendezvous and snapshot run in this process, and each replica is a process with the
product's follower, channel and staging around the stub engine of the tests, which copies a version into its parameters.
Policies have the shapes of Llamas and random weights in float32, the dtype that the laptop's recipe trains and
broadcasts in. Raw Gloo is one call of torch's broadcast of one float32 tensor of 512 MiB (`--raw-mib`; no more than the
policy has) between the same processes, in memory that was touched before. Per repeat: raw Gloo, a training step that
changes every weight, the snapshot, the publication, raw Gloo. Each replica then says the sum of the parameters that it
holds; another sum than the learner's ends the benchmark. Published are version 0, which forms the group and is reported
apart, and one version per repeat.

A ratio is bytes per second of the publication to the mean of raw Gloo's before and after it. "Received": from the call
of `publish` until every replica has received and verified the version and its ack is read, without the copy into the
parameters, which is the engine's own work; this has the target. "Held": that copy included. The table of phases has
medians in seconds, of the slowest replica: the snapshot (before the publication); the sender's broadcast; verifying (in
the replica, mostly beside the broadcast); the copy into the parameters; and the rest of the publication: the plan, the
acks, and what verifying takes after the last byte.

Pause. One replica with vLLM on one thread, for a model of SmolLM2-135M's shapes with random weights, answers 8 requests
of 160 tokens each; when all have drawn tokens, a version is published. The pause that a request sees is the longest
time between two of its tokens, which includes that its prompt is computed again; the usual gap is the median. A token
is lost if a request ends with fewer or more tokens than it asked for, or with others than it had before the sync.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.report.figures import Figure, Target
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options, positive
from benchmarks.weights import pause, transfer
from benchmarks.weights.pause import Interruption
from benchmarks.weights.policies import SHAPES, Policy
from benchmarks.weights.transfer import Publication
from learner.training.process_group import keep_freed_memory
from services.settings import WeightsSettings
from tests.harness.servers.redis_servers import start_server

NAME = "weights"
RATIO = Target(least=0.8)
MIB = 1 << 20
PARTS = ("transfer", "pause")
Measured = dict[tuple[str, int], list[Publication]]
"""Publications by policy and number of replicas; the first one of each formed the group."""


def needed(size: int, replicas: int) -> int:
    """The bytes that a fleet holds for a policy of `size` bytes: in the learner the policy and two snapshots, in each
    replica the parameters and the staged version."""
    return size * (3 + 2 * replicas)


def figures_of(measured: Measured) -> list[Figure]:
    """The ratios, and the seconds of a first publication."""
    figures = []
    for (name, replicas), (first, *steady) in measured.items():
        title = f"{name}, {replicas} replica{'s' * (replicas > 1)}"
        figures += [
            Figure(f"{title}: received / raw Gloo", tuple(each.received for each in steady), "", RATIO),
            Figure(f"{title}: held / raw Gloo", tuple(each.held for each in steady)),
            Figure(f"{title}: raw Gloo", tuple(each.raw_per_s / 1e9 for each in steady), "GB/s to each"),
            Figure(f"{title}: publication", tuple(each.publish_s for each in steady), "s"),
            Figure(f"{title}: the first, with its group", (first.publish_s,), "s"),
        ]
    return figures


def phases_of(measured: Measured) -> str:
    """The table of phases, in Markdown."""
    head = "| policy, replicas | snapshot | publication | broadcast | verifying | copy | rest |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for (name, replicas), (_, *steady) in measured.items():
        cells = [
            median(getattr(each, field) for each in steady)
            for field in ("snapshot_s", "publish_s", "broadcast_s", "checksum_s", "apply_s", "rest_s")
        ]
        rows.append(f"| {name}, {replicas} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    return "\n".join(rows)


def interruptions_of(found: Sequence[Interruption]) -> list[Figure]:
    """What requests saw."""
    return [
        Figure("vLLM: tokens lost", tuple(float(each.lost) for each in found), "", Target(most=0)),
        Figure("vLLM: pause that a request sees", tuple(each.longest_gap_s for each in found), "s"),
        Figure("vLLM: usual gap between two tokens", tuple(each.usual_gap_s for each in found), "s"),
        Figure("vLLM: pause as the replica reports it", tuple(each.pause_s for each in found), "s"),
        Figure("vLLM: receiving beside requests", tuple(each.staging_s for each in found), "s"),
        Figure("vLLM: publication beside requests", tuple(each.publish_s for each in found), "s"),
    ]


def panels_of(measured: Measured, found: Sequence[Interruption]) -> list[Panel]:
    """Ratios and bytes per second by the number of replicas; the seconds of a pause by repeat."""
    panels = []
    if measured:
        fleets: Mapping[str, list[int]] = {
            name: [replicas for policy, replicas in measured if policy == name] for name, _ in measured
        }

        def line(label: str, name: str, field: str, unit: float = 1.0) -> Series:
            middle = [median(getattr(each, field) for each in measured[name, n][1:]) / unit for n in fleets[name]]
            return Series(label, tuple(map(float, fleets[name])), tuple(middle))

        ratios = [line(f"{name}, {field}", name, field) for name in fleets for field in ("received", "held")]
        speeds = [line(name, name, "raw_per_s", 1e9) for name in fleets]
        panels += [
            Panel("of raw Gloo's bytes per second", "replicas", "ratio", tuple(ratios)),
            Panel("raw Gloo", "replicas", "GB/s to each", tuple(speeds)),
        ]
    if found:
        x = tuple(float(number) for number in range(len(found)))
        seen = Series("a request's longest gap", x, tuple(each.longest_gap_s for each in found))
        told = Series("as the replica reports it", x, tuple(each.pause_s for each in found))
        panels.append(Panel("pause of vLLM", "repeat", "s", (seen, told)))
    return panels


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = options(NAME, __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["SmolLM2-135M", "1 GB"])
    parser.add_argument("--replicas", nargs="+", type=positive, default=[1, 2, 4], help="numbers of replicas (1 2 4)")
    parser.add_argument("--raw-mib", type=positive, default=512, help="of raw Gloo's tensor (512)")
    parser.add_argument("--bucket-mib", type=positive, default=WeightsSettings().bucket_mib, help="as in a recipe (64)")
    parser.add_argument("--pause-model", choices=sorted(SHAPES), default="SmolLM2-135M", help="that vLLM serves")
    parser.add_argument("--tokens", type=positive, default=160, help="of each request (160)")
    return parser.parse_args(arguments)


def transfers(given: argparse.Namespace, redis_url: str) -> Measured:
    """The part `transfer`. Raises SystemExit where the memory is too small."""
    measured: Measured = {}
    settings = WeightsSettings(bucket_mib=given.bucket_mib)
    for name in given.models:
        policy = Policy(name)
        for replicas in given.replicas:
            free = psutil.virtual_memory().available + policy.size
            if free < (wanted := needed(policy.size, replicas)):
                raise SystemExit(
                    f"{name}, {replicas} replicas: {free / 1e9:.1f} GB are free, {wanted / 1e9:.1f} needed"
                )
            run = f"transfer-{len(measured)}"
            size = min(given.raw_mib * MIB, policy.size)
            found = transfer.measure(redis_url, run, policy, settings, replicas, given.repeats, size)
            measured[name, replicas] = asyncio.run(found)
            print(f"{name}, {replicas} replicas: measured", flush=True)
    return measured


def main(arguments: Sequence[str]) -> int:
    """Measure and report; status 1: a target was missed."""
    given = parsed(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as the learner does
    measured: Measured = {}
    found: list[Interruption] = []
    with tempfile.TemporaryDirectory() as place, start_server(Path(place), "--appendfsync", "always") as server:
        redis_url = f"redis://127.0.0.1:{server.port}/0"
        if "transfer" in given.parts:
            measured = transfers(given, redis_url)
        if "pause" in given.parts:
            settings = WeightsSettings(bucket_mib=given.bucket_mib)
            model = Path(place) / "model"
            interrupted = pause.measure(redis_url, model, given.pause_model, settings, given.repeats, given.tokens)
            found = asyncio.run(interrupted)
    details = {
        "publications": [
            {"policy": name, "replicas": replicas, "first": asdict(first), "steady": [asdict(each) for each in steady]}
            for (name, replicas), (first, *steady) in measured.items()
        ],
        "interruptions": [asdict(each) for each in found],
    }
    figures = figures_of(measured) + (interruptions_of(found) if found else [])
    notes = [phases_of(measured)] if measured else []
    return Report(NAME, figures, panels_of(measured, found), details, notes).finish(given.out)
