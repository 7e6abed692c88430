"""Owns the names of the benchmarks: `penstock bench` lists them, `penstock bench NAME ...` runs one.

Must not measure. Each module has `main(arguments) -> exit status`; its docstring says what is measured and how.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A benchmark: the module with its `main`, what it asks, and about how long it takes on two cores."""

    module: str
    question: str
    takes: str


BENCHMARKS: dict[str, Benchmark] = {
    "demo": Benchmark("benchmarks.loop.demo", "How long does the demo take, and what does the model learn?", "40 min"),
    "vs-trl": Benchmark(
        "benchmarks.loop.vs_trl", "How long do Penstock and TRL take to the same held-out accuracy?", "100 min"
    ),
    "overlap": Benchmark("benchmarks.loop.overlap", "What does it bring that generation runs ahead?", "75 min"),
    "learner": Benchmark(
        "benchmarks.learner.step.command", "What does a step cost, beside a padded Hugging Face loop?", "15 min"
    ),
    "weights": Benchmark(
        "benchmarks.weights.bench",
        "How fast does a policy version reach every replica, and what does a request see of it?",
        "7 min",
    ),
    "data-plane": Benchmark(
        "benchmarks.data_plane.command",
        "what moving groups costs, beside redis-py, many pending groups and ended runs",
        "some minutes",
    ),
    "fleet": Benchmark(
        "benchmarks.simulation.fleet.__main__",
        "How well are 1 to 4,096 replicas used, and what is saturated first?",
        "6 min",
    ),
    "start-up": Benchmark(
        "benchmarks.loop.start_up.bench", "How long does a run take to its first token, and which part of it?", "6 min"
    ),
    "verdicts": Benchmark(
        "benchmarks.verifier.verdicts.speed", "verdicts per second and core, beside math-verify alone", "some minutes"
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, with the others; without one, list all. Status 2: unknown."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *others = arguments
    if name not in BENCHMARKS:
        print(f"{name!r} is not a benchmark: expected one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    status: int = import_module(BENCHMARKS[name].module).main(others)
    return status


def listing() -> str:
    """The benchmarks, one per line."""
    width = max(map(len, BENCHMARKS), default=0)
    lines = (f"  {name:<{width}}  {found.question} ({found.takes})" for name, found in BENCHMARKS.items())
    return "\n".join(("penstock bench NAME [options]; --help of each says how it measures.", "", *lines))


def end_on_sigterm() -> None:
    """Raise SystemExit at SIGTERM, as Ctrl-C raises KeyboardInterrupt: what the benchmark started ends with it."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # the end, too, takes its time
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(sys.argv[1:]))
