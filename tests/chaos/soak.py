"""Owns the soak: thousands of small rollout steps without faults, after which nothing may have grown but its records.

Must not load a model. `python -m tests.chaos.stub --soak 5000`
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import lookups
from tests.chaos.campaign import say
from tests.chaos.server import Server
from tests.harness.stack import ENDED
from tests.harness.stubs.stack import StubStack
from tests.harness.stubs.workload import recipe, write_questions

GROUPS_PER_STEP, SAMPLES, QUESTIONS = 2, 2, 64
LOOK_S = 0.05
SILENCE_S = 60.0
SAMPLES_PER_QUARTER = 16
CHECKPOINT_EVERY = 10
"""Steps. Between two checkpoints the archive of batches grows, and is then cut: looks must meet all of its heights."""
SETTLED = 160
"""From this step on there are as many released groups as Redis keeps (512), and the archive has all of its files."""
CPU_FACTOR, MEMORY_FACTOR = 1.25, 1.1
"""How much more the last quarter may use than the second."""
SLACK_BYTES, SLACK_KEYS, SLACK_FILES = 64 * 1024, 40, 8
"""What differs from one moment to the next."""
RECORD_BYTES = 3_000
"""The most that one committed step may leave in Redis: its record, which is kept for the run's metrics."""
GROWING = ("steps", "events", "weight-plans", "weight-acks")
"""Streams that keep a record per step, or are long below their cap; each has a bound of its own."""
RECORDS = "records"
"""The part of a run's folder that keeps one file per step."""


@dataclass(frozen=True)
class Look:
    """What a run holds at one step: CPU seconds of all processes, bytes and keys in Redis by kind, files by folder."""

    step: int
    cpu_s: float
    bytes: Mapping[str, int]
    keys: Mapping[str, int]
    files: Mapping[str, int]
    server_bytes: int

    def steady(self, what: Mapping[str, int]) -> int:
        """The sum over everything that must not grow."""
        return sum(count for name, count in what.items() if name not in (*GROWING, RECORDS))


def look(server: Any, run: str, step: int, pids: list[int], folder: Path) -> Look:
    """What the run holds now."""
    prefix, sizes, keys = lookups.key(run, ""), Counter[str](), Counter[str]()
    for name in server.scan_iter(match=f"{prefix}*", count=1000):
        kind = name.decode().removeprefix(prefix).split(":")[0]
        size = server.memory_usage(name, samples=0)
        if size is not None:  # not deleted meanwhile
            sizes[kind] += size
            keys[kind] += 1
    files = Counter(
        path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file() and path.parent != folder
    )
    for grows in ("logs", "groups"):  # the archive of groups grows with each group, by few files: they are merged
        files.pop(grows, None)
    used = int(server.info("memory")["used_memory"])
    return Look(step, sum(map(_cpu_s, pids)), sizes, keys, files, used)


def _cpu_s(pid: int) -> float:
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(each.cpu_times()[:2])
    return total


@dataclass(frozen=True)
class Soaked:
    """A finished soak. `looks`: by rising step, up to SAMPLES_PER_QUARTER of them in each quarter."""

    steps: int
    state: str
    committed: list[int]
    reconciled: bool
    looks: list[Look]

    def _quarter(self, number: int) -> list[Look]:
        """The looks of a quarter (1 to 4), without those before SETTLED."""
        low, high = (number - 1) * self.steps / 4, number * self.steps / 4
        return [each for each in self.looks if max(low, SETTLED) <= each.step <= high]

    def per_step(self, number: int) -> float:
        """CPU seconds per step in a quarter."""
        first, *_, last = self._quarter(number)
        return (last.cpu_s - first.cpu_s) / (last.step - first.step)

    def _most(self, number: int, name: str) -> int:
        return max(each.steady(getattr(each, name)) for each in self._quarter(number))

    @property
    def faults(self) -> list[str]:
        """What is wrong with the run, and what has grown."""
        found = []
        if self.state != "succeeded" or self.committed != list(range(1, self.steps + 1)):
            found.append(f"the run {self.state} after {len(self.committed)} of {self.steps} steps")
        if not self.reconciled:
            found.append("its counters do not reconcile")
        if not (self._quarter(2) and self._quarter(4)):
            return [*found, "too few steps to compare"]
        for name, slack in (("bytes", SLACK_BYTES), ("keys", SLACK_KEYS), ("files", SLACK_FILES)):
            second, fourth = self._most(2, name), self._most(4, name)
            if fourth > MEMORY_FACTOR * second + slack:
                found.append(f"{name} grew from {second} to {fourth}: {self._grown(name)}")
        if self.per_step(4) > CPU_FACTOR * self.per_step(2):
            found.append(f"CPU per step grew from {1000 * self.per_step(2):.1f} to {1000 * self.per_step(4):.1f} ms")
        last = self.looks[-1]
        if (growing := sum(last.bytes.get(name, 0) for name in GROWING) / last.step) > RECORD_BYTES:
            found.append(f"each step left {growing:.0f} bytes in {', '.join(GROWING)}: expected at most {RECORD_BYTES}")
        if last.files.get(RECORDS, 0) > self.steps:
            found.append(f"{last.files[RECORDS]} records of {self.steps} steps")
        return found

    def _grown(self, name: str) -> dict[str, int]:
        before, after = getattr(self._quarter(2)[-1], name), getattr(self._quarter(4)[-1], name)
        return {kind: after[kind] - before.get(kind, 0) for kind in after if after[kind] > before.get(kind, 0)}

    def __str__(self) -> str:
        lines = ["quarter | CPU ms/step | Redis KiB | keys | files | with records: KiB, files | server MiB"]
        for number in (1, 2, 3, 4):
            looks = self._quarter(number)
            if len(looks) < 2:
                continue
            last = looks[-1]
            kib, files = sum(last.bytes.values()) / 1024, sum(last.files.values())
            lines.append(
                f"{number:7} | {1000 * self.per_step(number):11.1f} | {self._most(number, 'bytes') / 1024:9.0f} | "
                f"{self._most(number, 'keys'):4} | {self._most(number, 'files'):5} | "
                f"{kib:14.0f}, {files:8} | {last.server_bytes / 2**20:.1f}"
            )
        return "\n".join(lines)


def play(folder: Path, steps: int) -> Soaked:
    """Train `steps` steps of GROUPS_PER_STEP groups of SAMPLES samples, and look at what they leave."""
    run = "soak"
    made = recipe(
        write_questions(folder / "questions.jsonl", QUESTIONS + 16),
        QUESTIONS,
        rollout_steps=steps,
        groups_per_step=GROUPS_PER_STEP,
        max_inflight_groups=16 * GROUPS_PER_STEP,
        group_size=SAMPLES,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    with ExitStack() as held:
        redis = held.enter_context(Server(folder / "valkey"))
        stack = held.enter_context(StubStack(folder / "runs", redis.url, {"rollout": ("--filtered", "0.25")}))
        server = lookups.client(redis.url)
        held.callback(server.close)
        stack.submit(made, run)
        looks = _watch(server, run, steps, stack, redis, folder / "runs" / run)
        committed = [lookups.message(fields)["step"] for _, fields in server.xrange(lookups.key(run, "steps"))]
        return Soaked(steps, lookups.state(server, run), committed, _reconciled(server, run), looks)


def _watch(server: Any, run: str, steps: int, stack: StubStack, redis: Server, folder: Path) -> list[Look]:
    """Looks at evenly spaced steps until the run has ended. Raises RuntimeError when it makes no progress."""
    looks: list[Look] = []
    every = max(1, steps // (4 * SAMPLES_PER_QUARTER))
    while math.gcd(every, CHECKPOINT_EVERY) > 1:
        every += 1
    seen, since = 0, time.monotonic()
    while lookups.state(server, run) not in ENDED:
        stack.check()
        policy = lookups.policy(server, run)
        step = policy[1] if policy else 0
        if step != seen or step >= steps:
            seen, since = step, time.monotonic() if step < steps else since
        if time.monotonic() - since > SILENCE_S:
            raise RuntimeError(f"no rollout step within {SILENCE_S:g} s after step {step}; see {folder / 'logs'}")
        if step and step < steps and (not looks or step >= looks[-1].step + every):
            pids = [kept.pid for kept in stack.processes(run).values() if kept.pid] + [redis.pid or os.getpid()]
            looks.append(look(server, run, step, pids, folder))
        time.sleep(LOOK_S)
    return looks


def _reconciled(server: Any, run: str) -> bool:
    counters = {name: int(value) for name, value in lookups.texts(server.hgetall(lookups.key(run, "counters"))).items()}
    ended = sum(counters.get(name, 0) for name in ("trained", "filtered", "stale", "dead"))
    return counters["dispatched"] == ended + int(server.scard(lookups.key(run, "pending")))


def main(folder: Path, steps: int) -> int:
    """Play, print the table; the exit status."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    soaked = play(folder, steps)
    print(soaked)
    for fault in soaked.faults:
        print(f"FAILED: {fault}")
    say(f"{steps} steps in {time.monotonic() - begun:.0f} s: {'FAILED' if soaked.faults else 'nothing grew'}")
    return 1 if soaked.faults else 0
