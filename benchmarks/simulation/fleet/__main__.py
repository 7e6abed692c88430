"""Owns `penstock bench fleet`: how well fleets of 1 to 4,096 replicas are used, and which part is saturated first.

What is simulated. Discrete events under a virtual clock: replicas whose throughput saturates with their sequences (64
sequences of 39 tokens/s, 89 tokens/s alone), responses of log-normal length (median 2,500 tokens, cut at 20,480; drawn
apart from correctness), groups of 16, verdicts after a second, a learner whose step takes as long as its tokens, weight
syncs for which the learner waits and the replicas pause a second, replicas that die every 8 hours each and are replaced
after 180 s, while others go on from what was kept of their responses. Prompts have known pass rates. The sampler's own
code draws prompts, screens and filters groups, limits what is in flight, estimates survival, orders and releases what
is stale, and escalates starvation; a replica leases by the rollout service's own rule. Prefill, the growth of attention
with length, and delays of Redis are not simulated.

Scaling is weak: up to 128 replicas a batch has 512 groups, beyond that 4 per replica, which is what the sequences of a
replica hold; the learner trains 1.15 times as fast as the fleet can supply. `--groups` sets the 512, and with it the
base of 128 replicas on which the figures are taken. What a batch of 512 does beyond that is a table of its own.

The bound is the lower one of two rates. The fleet's: replicas x 2,496 tokens/s, by the tokens that a kept group costs:
the mean length (closed form of a cut log-normal) x the samples drawn per kept group, G / h with h the mean of
1 - p^G - (1-p)^G over the prompts; with a screen of k (k + h_k (G - k)) / h_k; `boundary` is held to h at p = 1/2, the
highest possible. The learner's: a batch by its step, training and weight sync. Replicas that are down, pauses, the
learner's waits, and groups that become stale are what a run may lose to it.

Synchronous DAPO is the same pipeline with max_staleness 0: dispatch stops once the batch is full, everything waits for
its longest response, then for the training and the sync. `refill` replaces filtered groups one by one; `generation
batches` is the published script's loop, with the best of 1, 2 or 3 batches generated at a time.

Selections are compared with a quarter of the base's fleet and batch, in which every prompt is drawn several times.

GPU-seconds are those of the replicas, those that start included, and a quarter as many of the learner. After a warm-up
of at least the longest response, `--steps` rollout steps are counted; of large batches fewer, at least two. Figures
have one value per seed, tables seed 0.

Costs of the parts that do not grow with the fleet are measured in `--seconds` seconds with a real Valkey, sampler,
verifier and pull loop around an engine that answers at once (see benchmarks/data_plane); 0 leaves them out.

Must not contain a rule of the sampler.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.report import Report, options, positive
from benchmarks.simulation.fleet import costs, saturation
from benchmarks.simulation.fleet.result import Result
from benchmarks.simulation.fleet.setup import ENGINE, LENGTHS
from benchmarks.simulation.fleet.study import GROWTH, Study, study
from benchmarks.simulation.fleet.tables import panels, saturated, tables

SCALES = tuple(2**power for power in range(13))
LOOKED_AT = 256
"""Heartbeats that are looked at to measure what one costs."""


def main(arguments: Sequence[str]) -> int:
    """Simulate, measure, print; exit status 1 if a target was missed."""
    parser = options("fleet", __doc__)
    parser.add_argument("--scales", type=_scales, default=SCALES, help="numbers of replicas (1,2,4,...,4096)")
    parser.add_argument("--groups", type=positive, default=512, help="groups of a batch at the base (512)")
    parser.add_argument("--steps", type=positive, default=8, help="rollout steps that are counted (8)")
    parser.add_argument("--jobs", type=positive, default=1, help="fleets that are simulated at the same time (1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of moving groups to measure costs; 0: none (5)")
    args = parser.parse_args(arguments)
    begins = time.monotonic()
    found = study(args.scales, args.groups, args.steps, args.repeats, args.jobs, lambda text: print(text, flush=True))
    notes = [*tables(found), f"simulated in {time.monotonic() - begins:.0f} s, {args.jobs} at a time"]
    details: dict[str, object] = {name: [_row(each) for each in results] for name, results in vars(found).items()}
    if args.seconds:
        measured = _costs(args.seconds, found.base[0])
        parts = saturation.parts(found.base[0], measured)
        notes += [saturated(parts), f"Costs: {_text(measured)}"]
        details |= {"costs": asdict(measured), "saturated at": {part.name: part.replicas for part in parts}}
    return Report("fleet", figures(found), panels(found), details, notes).finish(args.out)


def figures(found: Study) -> list[Figure]:
    """The figures with targets, and those that compare with synchronous fleets."""
    base, count = found.base, f"{found.base[0].setup.replicas} replicas"

    def rates(results: Sequence[Result]) -> list[float]:
        return [each.groups_per_s for each in results]

    def gpu_s(results: Sequence[Result]) -> list[float]:
        return [each.gpu_s for each in results]

    uniform = [each for each in found.ways if each.setup.way.strategy == "uniform"]
    return [
        Figure(f"share of the bound, {count}", tuple(each.of_bound for each in base), "", Target(least=0.95)),
        Figure("smallest share of the bound of all scales", (min(each.of_bound for each in found.scales),)),
        ratio(
            f"GPU-seconds per group, {GROWTH} x {count} with {GROWTH} x the batch",
            gpu_s(base),
            gpu_s(found.grown),
            Target(least=0.93),
        ),
        ratio(
            f"GPU-seconds per group, from {found.smaller[0].setup.replicas} to {count}, same batch",
            gpu_s(found.smaller),
            gpu_s(base),
            Target(least=0.93),
        ),
        Figure(
            "groups kept / group-signal bound, uniform",
            tuple(each.kept / each.signal for each in uniform),
            "",
            Target(least=0.97),
        ),
        Figure(f"fleet used, {count}", tuple(each.used for each in base)),
        Figure(f"learner idle, {count}", tuple(each.idle for each in base)),
        ratio("groups/s, of synchronous DAPO with refill", rates(base), rates(found.refilled_base)),
        ratio("groups/s, of synchronous DAPO with generation batches", rates(base), rates(found.published_base)),
    ]


def _costs(seconds: float, base: Result) -> costs.Costs:
    pieces = max(1, round(ENGINE.max_sequences / max(1.0, base.open_groups)))
    with tempfile.TemporaryDirectory() as folder:
        return costs.measure(Path(folder), seconds, round(LENGTHS.mean), pieces, round(ENGINE.per_sequence), LOOKED_AT)


def _text(found: costs.Costs) -> str:
    return (
        f"per judged group of 16 responses of {LENGTHS.mean:,.0f} tokens: "
        f"sampler {1e3 * found.sampler_s:.1f} ms, verifier "
        f"{1e3 * found.verifier_s:.1f} ms, Redis {1e3 * found.redis_s:.1f} ms, {found.redis_in / 1e6:.2f} MB in and "
        f"{found.redis_out / 1e6:.2f} MB out; per call that keeps a second of a group's half-drawn responses: Redis "
        f"{1e6 * found.keep_s:.0f} us, {found.keep_in / 1e3:.1f} kB; per look at a heartbeat: learner "
        f"{1e6 * found.look_s:.0f} us, Redis {1e6 * found.look_redis_s:.1f} us, {found.look_out:.0f} bytes"
    )


def _row(result: Result) -> dict[str, object]:
    facts = asdict(result)
    setup = facts.pop("setup")
    kept = ("replicas", "batch", "way", "population", "max_staleness", "refill", "batch_factor", "seed")
    return {name: setup[name] for name in kept} | facts | {"bound": result.setup.bound, "of_bound": result.of_bound}


def _scales(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
