"""The outage of the store: no request succeeds while it lasts, nothing is lost, and it must have an effect."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import outage
from tests.chaos.faults import FAULTS
from tests.chaos.ground import EMBEDDED, Ground, ground
from tests.chaos.lookups import client, key
from tests.chaos.scene import Moment, Scene
from tests.chaos.server import Server
from tests.harness.workload import recipe

RUN = "stored"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture(scope="module")
def stands_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("ground"), EMBEDDED, store=True) as made:
        yield made


@pytest.fixture
def scene(server: Server, stands_on: Ground, tmp_path: Path) -> Iterator[Scene]:
    document = recipe(tmp_path, tmp_path, steps=20, replicas=1, ranks=1, staleness=1)
    with client(server.url) as raw:
        raw.flushall()
        raw.hset(key(RUN, "policy"), mapping={"version": 1, "step": 1})
        raw.xadd(key(RUN, "batches"), {"m": json.dumps({"step": 2})})
        yield Scene(RUN, raw, None, tmp_path, document, random.Random(7), stands_on)  # type: ignore[arg-type]


def status(stands_on: Ground) -> int | None:
    """The status of a request without a signature; None without an answer."""
    assert stands_on.store is not None
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{stands_on.store.port}/", timeout=1).close()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
    return 200


@pytest.mark.parametrize("how", sorted(outage.WAYS))
def test_the_store_is_away_and_comes_back(stands_on: Ground, how: str):
    assert stands_on.store is not None
    kept = stands_on.files(RUN, Path("unused")) / "records/kept.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("{}")
    before = status(stands_on)
    assert before not in (None, 503)
    back = outage.WAYS[how](stands_on.store)
    assert status(stands_on) == (503 if how == "refusing" else None)
    back()
    assert status(stands_on) == before
    assert kept.read_text() == "{}"


def announce(raw: Any, *waits: str) -> None:
    announced = {"id": "learner-1", "service": "learner", "pid": 1, "state": "ready", "version": 1}
    body = json.dumps(announced | {"waits": [{"name": name} for name in waits]})
    raw.hset(key(RUN, "heartbeats"), "learner-1", f"{raw.time()[0] * 1000} {body}")


def test_an_outage_lasts_until_the_learner_has_waited(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.chaos.outage.SHORTEST_S", 0.1)
    monkeypatch.setattr("tests.chaos.outage.LONGEST_S", 0.2)
    announce(scene.server, "batches")
    struck = outage.take_away(scene, outage.storing(scene) or Moment())
    assert struck is not None
    assert struck.moment.batch == 2
    assert outage.take_away(scene, struck.moment) is None, "it is away already"
    time.sleep(0.3)
    assert not struck.due()
    announce(scene.server, "store")
    assert struck.due()
    assert struck.had_effect()
    assert struck.release is not None
    struck.release()
    assert not scene.outage.locked()
    recovered = FAULTS["store away"].recovered
    scene.server.hset(key(RUN, "policy"), "step", 3)
    assert not recovered(scene, struck), "the record of step 2 is not in the store"
    record = scene.files / "records/step-000002.e0001-learner-1a2b3c4d.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("{}")
    assert recovered(scene, struck)


def test_an_outage_that_is_not_noticed_has_no_effect(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.chaos.outage.EFFECT_S", 0.1)
    struck = outage.take_away(scene, Moment(batch=2))
    assert struck is not None
    assert struck.release is not None
    time.sleep(0.2)
    assert struck.due()
    struck.release()
    assert not struck.had_effect()


def test_without_a_store_there_is_no_moment(scene: Scene):
    scene.ground = Ground()
    assert outage.storing(scene) is None
    assert scene.files == scene.folder
