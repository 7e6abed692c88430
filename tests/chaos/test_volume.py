"""A run whose Redis has its volume filled waits, and goes on when there is space: nothing is lost or trained twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.chaos import disk
from tests.chaos.episode import Episode
from tests.chaos.ground import Ground
from tests.chaos.injector import Outcome
from tests.chaos.scene import Scene
from tests.harness.programs import needed
from tests.harness.servers.redis_servers import PASSWORDS, START_SCRIPT, Process, script_settings
from tests.harness.stubs.stack import StubStack
from tests.harness.stubs.workload import recipe, write_questions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(disk.refusal()), reason=disk.refusal() or ""),
]

STEPS, QUESTIONS = 40, 200
WAIT_S = 60.0
FULL_KIB = 1_000
"""Too little for the state `short`, and enough for what the run writes until the watch has looked."""
CALM_S = 12.0
"""Longer than the sampler looks before it trains what is left, and far shorter than the 60 s that a process waits for
Redis."""


@dataclass
class Filled(Episode):
    """An episode whose fault is the volume. `server`: on it; `volume`: where it is mounted."""

    server: Process | None = None
    volume: Path = Path()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        assert self.server is not None
        ends = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < ends, f"{what}\n{self.server.log.read_text()[-3000:]}"
            self.lives()
            time.sleep(0.1)

    def still(self, scene: Scene) -> int:
        """The step at which the run waits: what was in flight has ended."""
        ends, step, since = time.monotonic() + WAIT_S, scene.step(), time.monotonic()
        while time.monotonic() - since < CALM_S:
            assert time.monotonic() < ends, "the run does not wait"
            assert step < STEPS, "the run ended"
            self.lives()
            if (now := scene.step()) != step:
                step, since = now, time.monotonic()
            time.sleep(0.1)
        return step

    def logged(self, text: str) -> bool:
        """Whether the start script has written it."""
        assert self.server is not None
        return text in self.server.log.read_text()

    def _strike(self, scene: Scene, faults: Sequence[str], at_once: int) -> list[Outcome]:
        assert self.server is not None
        filler = disk.fill(self.volume, left_kib=16_000)
        self.until(lambda: self.logged("redis: volume short"), "data that grow are refused")
        before = self.still(scene)
        filler.unlink()
        self.until(lambda: scene.step() > before, "the run goes on")
        filler = disk.fill(self.volume, left_kib=FULL_KIB)
        self.until(lambda: self.logged("redis: volume full"), "all writes are refused")
        self.still(scene)
        self.server.kill()
        filler.unlink()
        filler = disk.fill(self.volume, left_kib=0)
        self.server.start()
        before = self.still(scene)
        filler.unlink()
        self.until(lambda: scene.step() > before, "the run goes on")
        return []

    def lives(self) -> None:
        """A full volume does not end the server."""
        assert self.server is not None
        assert self.server.process.poll() is None, f"the server ended\n{self.server.log.read_text()[-3000:]}"


@pytest.fixture
def server(open_path: Path) -> Iterator[Process]:
    needed("redis-cli")
    environment, port = script_settings(open_path)
    script = open_path / "start.sh"
    script.write_text(START_SCRIPT.read_text().replace("-@all \\", "-@all +@read \\"))  # for the oracle
    with disk.own_disk(open_path / "data"):
        (open_path / "data").chmod(0o777)
        user = 999 if os.geteuid() == 0 else None
        with Process(open_path, ["sh", str(script)], port, environment, user) as server:
            yield server
            print(server.log.read_text())  # shown if the test fails


def test_a_run_waits_for_space_on_the_volume_of_redis(server: Process, open_path: Path, tmp_path: Path):
    login = f"penstock:{quote(PASSWORDS['penstock'], safe='')}"
    url = f"redis://{login}@127.0.0.1:{server.port}/0"
    document = recipe(
        write_questions(tmp_path / "questions.jsonl", QUESTIONS),
        QUESTIONS - 8,
        rollout_steps=STEPS,
        groups_per_step=8,
        group_size=4,
        lease_s=2.0,
        checkpoint_every=4,
    )
    arguments = {"rollout": ("--filtered", "0.25", "--delay-s", "0.02"), "learner": ("--train-s", "0.4")}
    with StubStack(tmp_path, url, arguments) as stack:
        ground = Ground(url, url)
        episode = Filled(stack, "volume", document, 1, ground, server=server, volume=open_path / "data")
        played = episode.play([], 1)
    assert played.state == "succeeded", played.reason
    assert played.judgement.findings == (), played.judgement
