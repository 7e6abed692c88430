"""Owns `python -m benchmarks.loop.spot`: it takes a replica away every 30 s, with a notice and without one.

Must not judge: a target stands beside each figure. Takes about twelve minutes on two cores.

The same fleet first works undisturbed. Throughput is tokens per second in which a replica was ready, because a node
that is not there costs nothing. At the end of each part all groups are drawn to their ends: every drawn token that is
in no sample was drawn in vain.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.loop.spot.fleet import Fleet
from services.contracts import Lane, Prompt, Release, Sample, Sampling, Task
from services.process.hosting import Context
from services.streams.connection.client import connect
from services.streams.delivery.consumer import tail
from services.streams.state.group_state import GroupTransitions
from services.streams.state.runs import RunRecords
from tests.harness.servers.redis_servers import start_server
from tests.harness.small_run import recipe_document, service_context
from tests.harness.tiny_model import write_tiny_model

SAMPLES, SEQUENCES, STOP = 4, 8, 3
TARGETS = {"throughput": 0.9, "in vain": 0.02, "lost": 0}
START_S, FINISH_S, POLL_S = 900.0, 900.0, 0.1


def write_model(folder: Path, longest: int) -> Path:
    """A tiny model that never draws its stop token, so that responses are as long as their tasks ask for."""
    write_tiny_model(folder, tied=False)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.max_position_embeddings = longest
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0  # the largest part of every hidden state
        model.lm_head.weight[STOP] = 0.0
        model.lm_head.weight[STOP, 0] = -50.0
    model.save_pretrained(folder)
    return folder


@dataclass
class Feeder:
    """The sampler's side: keeps `wanted` groups in flight, and notes every sample."""

    context: Context
    transitions: GroupTransitions
    tokens: int
    wanted: int
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    flight: dict[str, set[int]] = field(default_factory=dict)
    published: int = 0
    samples: int = 0
    groups: int = 0
    _after: str = "0-0"

    async def feed(self, *, more: bool = True) -> None:
        """Take what was published, end the groups that are whole, and dispatch others. Raises for a second sample."""
        stream = self.context.keys.lane(Lane.TRAIN).samples
        while entries := await tail(self.context.redis, stream, self._after, 100):
            self._after = entries[-1][0]
            for _, body in entries:
                await self._take(Sample.model_validate_json(body))
        while more and len(self.flight) < self.wanted:
            name = f"g{self.groups:06d}"
            self.groups += 1
            self.flight[name] = set()
            await self.transitions.dispatch(Lane.TRAIN, [self._task(name)], None)

    async def _take(self, sample: Sample) -> None:
        there = self.flight[sample.group]
        if sample.index in there:
            raise RuntimeError(f"sample {sample.index} of group {sample.group} was published twice")
        there.add(sample.index)
        self.published += sample.facts.response_tokens
        self.samples += 1
        if len(there) == SAMPLES:
            await self.transitions.release(Lane.TRAIN, sample.group, Release.FILTERED, SAMPLES)
            await self.context.redis.unlink(*self.context.keys.made(sample.group, SAMPLES))
            del self.flight[sample.group]

    def _task(self, name: str) -> Task:
        tokens = self.dice.randint(self.tokens // 4, self.tokens)
        prompt = Prompt(id=name, messages=({"role": "user", "content": name},), verifier="pattern", reference={})
        sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=tokens)
        return Task(group=name, prompt=prompt, samples=SAMPLES, sampling=sampling)


@dataclass(frozen=True)
class Part:
    """One part of the benchmark. `drawn` and `in_vain`: tokens; `ready_s`: replica-seconds."""

    name: str
    ready_s: float
    drawn: int
    in_vain: int
    taken_away: int
    groups: int
    lost: int

    @property
    def per_s(self) -> float:
        """Tokens that ended in samples per second in which a replica was ready."""
        return (self.drawn - self.in_vain) / self.ready_s

    def line(self, undisturbed: float) -> str:
        """The part as a line of the table."""
        share = self.in_vain / self.drawn
        return (
            f"{self.name:12}{self.taken_away:8d}{self.ready_s:12.0f}{self.per_s:12.0f}{self.per_s / undisturbed:10.3f}"
            f"{100 * share:12.2f}{self.groups:8d}{self.lost:6d}"
        )


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float) -> None:
    """Poll; raises TimeoutError."""
    ends = time.monotonic() + deadline_s
    while not await condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} did not happen within {deadline_s:g} s")
        await asyncio.sleep(POLL_S)


async def part(name: str, sent: signal.Signals | None, given: argparse.Namespace, folder: Path, redis_url: str) -> Part:
    """A fleet at work for some time, from which a replica is taken away every so often."""
    redis = await connect(redis_url)
    limits = {"rollout_steps": 0, "lease_s": 10.0, "max_deliveries": 3}
    model = {"max_model_len": given.tokens + 128}
    document = recipe_document(
        folder / "model", limits=limits, model=model, rollout={"max_sequences": SEQUENCES, "max_new_tokens": 64}
    )
    try:
        async with service_context(redis, f"spot-{name}", document, "sampler") as context:
            await RunRecords(redis).set_paths(context.record.id, model_path=str(folder / "model"))
            transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
            feeder = Feeder(context, transitions, given.tokens, wanted=2 * given.replicas * SEQUENCES // SAMPLES)
            place = folder / name
            place.mkdir()
            fleet = Fleet(context.record.id, redis_url, place, given.replicas)
            try:
                return await _measured(name, sent, given, fleet, feeder)
            finally:
                await asyncio.to_thread(fleet.stop)
    finally:
        await redis.aclose()


async def _measured(
    name: str, sent: signal.Signals | None, given: argparse.Namespace, fleet: Fleet, feeder: Feeder
) -> Part:
    fleet.fill()

    async def all_ready() -> bool:
        return len(fleet.ready()) == fleet.wanted

    await until(all_ready, "the start of all replicas", START_S)
    began, taken_away = time.monotonic(), 0
    next_at = began + given.every
    while (now := time.monotonic()) < began + given.seconds:
        await feeder.feed()
        if sent and now >= next_at:
            next_at += given.every
            taken_away += fleet.take_away(sent)
        fleet.ready()
        await asyncio.sleep(POLL_S)
    ready_s, drawn = fleet.ready_s(began, time.monotonic()), fleet.drawn()

    async def finished() -> bool:
        await feeder.feed(more=False)
        fleet.ready()
        return not feeder.flight

    await until(finished, "the end of all groups", FINISH_S)
    context = feeder.context
    in_vain = fleet.drawn() - feeder.published
    lost = feeder.groups - feeder.samples // SAMPLES + int(await context.redis.xlen(context.keys.dead))
    return Part(name, ready_s, drawn, in_vain, taken_away, feeder.groups, lost)


async def run(given: argparse.Namespace, folder: Path, redis_url: str) -> None:
    """All parts, with a table."""
    modes: dict[str, Any] = {"undisturbed": None, "notice": signal.SIGTERM, "kill": signal.SIGKILL}
    print(
        f"{'replicas end':12}{'ended':>8}{'ready s':>12}{'tokens/s':>12}{'ratio':>10}{'in vain %':>12}"
        f"{'groups':>8}{'lost':>6}",
        flush=True,
    )
    undisturbed = 0.0
    for name in ("undisturbed", *given.modes):
        measured = await part(name, modes[name], given, folder, redis_url)
        undisturbed = undisturbed or measured.per_s
        print(measured.line(undisturbed), flush=True)
    print(
        f"targets: ratio {TARGETS['throughput']}, in vain below {100 * TARGETS['in vain']:g} %, lost {TARGETS['lost']}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop.spot")
    parser.add_argument("modes", nargs="*", choices=["notice", "kill", []], default=[])
    parser.add_argument("--seconds", type=float, default=180.0, help="of each part")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two replicas that end")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=3000, help="of the longest response")
    given = parser.parse_args()
    given.modes = given.modes or ["notice", "kill"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "model", given.tokens + 128)
        with start_server(folder, "--appendfsync", "everysec") as server:
            asyncio.run(run(given, folder, f"redis://127.0.0.1:{server.port}/0"))


if __name__ == "__main__":
    main()
