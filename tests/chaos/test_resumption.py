"""`resume --from` as a fault: it needs an older checkpoint, and a rewind counts as cut off only in its middle."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos import resumption
from tests.chaos.lookups import client, key
from tests.chaos.recovery import entry_dealt_with
from tests.chaos.scene import Moment, Scene
from tests.chaos.server import Server
from tests.chaos.strikes import struck_now
from tests.harness.stack import exists
from tests.harness.workload import recipe

RUN = "resumed"


class Api:
    """Answers like a gateway whose controller acts at once; `asked`: what it was asked."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.asked: list[tuple[str, Any]] = []
        self.refuses = False
        self.checkpoints = "[4, 8]"
        """Those that the learner has left when it is cancelled."""

    def post(self, path: str, json: Any = None) -> httpx.Response:
        self.asked.append((path.rsplit("/", 1)[1], json))
        if not self.refuses:
            self._raw.set(key(RUN, "checkpoints"), self.checkpoints)
            self._raw.hset(key(RUN, "record"), "state", {"cancel": "cancelled", "resume": "queued"}[self.asked[-1][0]])
        return httpx.Response(202 if not self.refuses else 422, text="refused")


class StackWith:
    def __init__(self, api: Api) -> None:
        self.api = api

    def redis(self) -> None:
        return None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def raw(server: Server) -> Iterator[Any]:
    with client(server.url) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def scene(raw: Any, tmp_path: Path) -> Scene:
    document = recipe(tmp_path, tmp_path, steps=20, replicas=1, ranks=1, staleness=1)
    raw.hset(key(RUN, "record"), mapping={"state": "running", "resumptions": 1})
    raw.hset(key(RUN, "policy"), mapping={"version": 9, "step": 8})
    raw.set(key(RUN, "checkpoints"), "[4, 8]")
    raw.xadd(key(RUN, "batches"), {"m": json.dumps({"step": 9})})
    stack: Any = StackWith(Api(raw))
    return Scene(RUN, raw, stack, tmp_path, document, random.Random(7))


@pytest.fixture
def sampler(raw: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    announced = {"id": "sampler-1", "service": "sampler", "pid": process.pid, "state": "starting", "version": None}
    raw.hset(key(RUN, "heartbeats"), "sampler-1", f"{raw.time()[0] * 1000} {json.dumps(announced)}")
    yield process
    process.kill()
    process.wait(10)


def test_a_run_is_resumed_from_an_older_checkpoint(raw: Any, scene: Scene):
    moment = resumption.resumable(scene)
    assert moment is not None
    assert moment.facts == {"from_step": 4}, "the committed step is not older"
    struck = resumption.resume_earlier(scene, moment)
    assert struck is not None
    assert scene.stack.api.asked == [("cancel", None), ("resume", {"from_step": 4})]  # type: ignore[union-attr]
    assert struck.facts == {"steps_left": 4}
    assert not scene.resuming.locked()
    raw.hset(key(RUN, "record"), "state", "running")
    raw.hset(key(RUN, "policy"), mapping={"step": 5, "rewinding": 1})
    assert not resumption.resumed(scene, struck)
    raw.hdel(key(RUN, "policy"), "rewinding")
    assert not resumption.resumed(scene, struck), "no event tells of the rewind"
    raw.xadd(key(RUN, "events"), {"m": json.dumps({"phase": "rewound", "text": "to step 4"})})
    assert resumption.resumed(scene, struck)


@pytest.mark.parametrize(("left", "step"), [("[6, 8]", 6), ("[8]", 0)])
def test_a_checkpoint_that_is_deleted_meanwhile_is_replaced(raw: Any, scene: Scene, left: str, step: int):
    scene.stack.api.checkpoints = left  # type: ignore[union-attr]
    moment = Moment(facts={"from_step": 4})
    assert resumption.resume_earlier(scene, moment) is not None
    assert scene.stack.api.asked[-1] == ("resume", {"from_step": step})  # type: ignore[union-attr]
    assert moment.facts == {"from_step": step}, "what the recovery is compared with"


def test_a_run_without_an_older_checkpoint_is_left_alone(raw: Any, scene: Scene):
    raw.set(key(RUN, "checkpoints"), "[8]")
    assert resumption.resumable(scene) is None
    assert resumption.resume_earlier(scene, Moment(facts={"from_step": 4})) is None
    assert scene.stack.api.asked == []  # type: ignore[union-attr]


def test_a_run_that_cannot_be_resumed_is_told(raw: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.chaos.resumption.RESUMED_S", 0.3)
    raw.hset(key(RUN, "record"), "state", "cancelled")
    scene.stack.api.refuses = True  # type: ignore[union-attr]
    with pytest.raises(resumption.NotResumedError, match=r"not resumed from step 4 within 0\.3 s: refused"):
        resumption.resume_earlier(scene, Moment(facts={"from_step": 4}))
    assert not scene.resuming.locked()


def test_a_cancelled_run_has_ended_unless_a_fault_resumes_it(raw: Any, scene: Scene):
    raw.hset(key(RUN, "record"), "state", "cancelled")
    assert scene.ended()
    with scene.resuming:
        assert not scene.ended()


def test_the_sampler_is_killed_in_the_middle_of_a_rewind(raw: Any, scene: Scene, sampler: subprocess.Popen[bytes]):
    raw.hset(key(RUN, "policy"), "rewinding", 1)
    struck = resumption.cut_off(resumption.kill_sampler)(scene, Moment(facts={"from_step": 4}))
    assert struck is not None
    assert sampler.wait(10) == -9
    assert struck.had_effect()


def test_a_rewind_that_ended_was_not_cut_off(raw: Any, scene: Scene, sampler: subprocess.Popen[bytes]):
    raw.hset(key(RUN, "policy"), "resumption", 1)
    struck = resumption.cut_off(resumption.kill_sampler)(scene, Moment(facts={"from_step": 4}))
    assert struck is not None
    assert not struck.had_effect()
    assert exists(sampler.pid)


def test_a_message_whose_stream_a_rewind_restarted_is_dealt_with(raw: Any, scene: Scene):
    entry = raw.xadd(key(RUN, "tasks"), {"m": "{}"}).decode()
    struck = struck_now(scene, Moment())
    struck.entry = ("tasks", entry)
    raw.xgroup_create(key(RUN, "tasks"), "rollout", id="0")
    assert not entry_dealt_with(scene, struck)
    raw.delete(key(RUN, "tasks"))
    raw.xgroup_create(key(RUN, "tasks"), "rollout", id="0", mkstream=True)
    assert not entry_dealt_with(scene, struck), "nothing explains why it is gone"
    raw.xadd(key(RUN, "events"), {"m": json.dumps({"phase": "rewound", "text": "to step 4"})})
    assert entry_dealt_with(scene, struck)
