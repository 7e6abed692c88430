"""Owns the benchmark of the archive of groups: how fast it is written, and one of 10,000 groups is found.

Must not start a service. Run it as `python -m benchmarks.data_plane.archive`; takes a minute or two.

Groups end in another order than they were dispatched, within a window of WINDOW, as in a run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from services.contracts import Lane, Outcome, Prompt, VersionSpan
from services.storage.groups.columns import to_groups
from services.storage.groups.filters import SampleFilter
from services.storage.groups.merging import merge_once
from services.storage.groups.parts import list_parts, write_part
from services.storage.groups.reader import GroupArchive
from services.storage.groups.story import ArchivedGroup, ArchivedSample, GroupRow, GroupTokens
from services.storage.mirror import NO_MIRROR

GROUPS, PER_PART, WINDOW = 10_000, 64, 256
SAMPLES, TOKENS, PROMPT_TOKENS = 8, 256, 64
FINDS, SCANS = 1_000, 3


def group_row(number: int, at_ms: int, random_numbers: np.random.Generator) -> GroupRow:
    """A group with random tokens, which no compression makes smaller than a real one."""
    name = f"g{number:08d}"
    samples = tuple(
        ArchivedSample(
            index=index,
            outcome=Outcome.WRONG if random_numbers.random() < 0.5 else Outcome.CORRECT,
            score=0.5,
            reason="the answer differs",
            reward=1.0,
            advantage=0.1,
            response_tokens=TOKENS,
            text=random_numbers.bytes(2 * TOKENS).hex(),
            spans=(VersionSpan(version=number // 64, start=0, end=TOKENS),),
        )
        for index in range(SAMPLES)
    )
    content = random_numbers.bytes(2 * PROMPT_TOKENS).hex()
    group = ArchivedGroup(
        group=name,
        lane=Lane.TRAIN,
        resumption=0,
        release="trained" if number % 3 else "filtered",
        step=number // 64,
        archived_ms=at_ms,
        prompt=Prompt(
            id=f"p{number}",
            messages=({"role": "user", "content": content},),
            verifier="math",
            reference={"answer": 1},
        ),
        samples=samples,
    )
    ids = tuple(random_numbers.integers(0, 150_000, TOKENS).astype(np.int32) for _ in range(SAMPLES))
    logprobs = tuple(-random_numbers.random(TOKENS).astype(np.float32) for _ in range(SAMPLES))
    return GroupRow(
        group, GroupTokens(random_numbers.integers(0, 150_000, PROMPT_TOKENS).astype(np.int32), ids, logprobs)
    )


def fill(folder: Path, groups: int) -> float:
    """Write the archive; the seconds that this took, without the making of rows."""
    order = [number + random.random() * WINDOW for number in range(groups)]
    ended = sorted(range(groups), key=lambda number: order[number])
    random_numbers, seconds = np.random.default_rng(1), 0.0
    for start in range(0, groups, PER_PART):
        rows = [group_row(number, 10**12 + start, random_numbers) for number in ended[start : start + PER_PART]]
        began = time.perf_counter()
        write_part(folder, NO_MIRROR, rows)
        seconds += time.perf_counter() - began
    return seconds


class Took(NamedTuple):
    """How long a call took, in milliseconds: on the clock, and of CPU time, which other processes do not change."""

    clock: float
    cpu: float


def timed(call: Callable[[], object]) -> Took:
    """How long a call takes that returns something."""
    began, cpu_began = time.perf_counter(), time.process_time()
    assert call() is not None
    return Took(1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu_began))


def scan(folder: Path, group: str) -> ArchivedGroup | None:
    """The group, found without any index: file after file, row group after row group."""
    for part in list_parts(folder, NO_MIRROR):
        file = pq.ParquetFile(folder / part.path)
        for number in range(file.num_row_groups):
            for found in to_groups(file.read_row_group(number)):
                if found.group == group:
                    return found
    return None


def measure(folder: Path, groups: int, title: str) -> None:
    """Print how long finds, searches and scans take."""
    wanted = [f"g{random.randrange(groups):08d}" for _ in range(FINDS)]
    archive = GroupArchive(folder)
    print(f"{title}: {len(list_parts(folder, NO_MIRROR))} files")
    first = [timed(lambda name=name: GroupArchive(folder).find(name)) for name in wanted[:20]]  # type: ignore[misc]
    show("find, by a reader that knows nothing yet", first)
    cold = [timed(lambda name=name: archive.find(name)) for name in wanted]  # type: ignore[misc]
    show("find, while the reader reads the files' indices", cold)
    warm = [timed(lambda name=name: archive.find(name)) for name in wanted]  # type: ignore[misc]
    show("find, afterwards", warm)
    scans = [timed(lambda name=name: scan(folder, name)) for name in wanted[:SCANS]]  # type: ignore[misc]
    show("scan of the files", scans)
    ratio = statistics.median(took.cpu for took in scans) / statistics.median(took.cpu for took in warm)
    print(f"  a scan takes {ratio:,.0f} times as much CPU time as a find")
    for text, filters in (
        ("one prompt", SampleFilter(prompt=f"p{groups // 2}")),
        ("one step", SampleFilter(step=groups // 128)),
        ("a text that no sample has", SampleFilter(text="nowhere")),
    ):
        show(f"search for {text}, one call", [timed(lambda wanted=filters: archive.search(wanted)) for _ in range(3)])  # type: ignore[misc]


def show(what: str, took: Sequence[Took]) -> None:
    """Print the median, the 99th percentile and the longest, on the clock and of CPU time."""
    figures = []
    for name in Took._fields:
        ordered = sorted(getattr(each, name) for each in took)
        high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        figures.append(f"{name} median {statistics.median(ordered):.1f}, p99 {high:.1f}, longest {ordered[-1]:.1f} ms")
    print(f"  {what}: {'; '.join(figures)}")


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=GROUPS)
    groups = parser.parse_args().groups
    random.seed(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        seconds = fill(folder, groups)
        size = sum(part.size for part in list_parts(folder, NO_MIRROR))
        print(f"{groups} groups of {SAMPLES} x {TOKENS} tokens: {size / 2**20:,.0f} MiB")
        print(f"written in {seconds:.1f} s: {groups / seconds:,.0f} groups/s, {size / 2**20 / seconds:.0f} MiB/s")
        measure(folder, groups, "as written")
        began = time.perf_counter()
        while merge_once(folder, NO_MIRROR):
            pass
        print(f"merged in {time.perf_counter() - began:.1f} s")
        measure(folder, groups, "merged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
