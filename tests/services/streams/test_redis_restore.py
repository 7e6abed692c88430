"""The chart's `restore`: a backup that does not fit harms nothing, and one that was interrupted is installed once."""

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from redis.exceptions import OutOfMemoryError, RedisError

from tests.chaos import disk
from tests.harness.programs import needed
from tests.harness.servers.release_redis import ReleaseRedis

pytestmark = pytest.mark.timeout(120)

ON_A_DISK = pytest.mark.skipif(bool(disk.refusal()), reason=disk.refusal() or "")


@pytest.fixture
def server(open_path):
    needed("redis-cli")
    server = ReleaseRedis(open_path)
    with server.process:
        yield server
        print(server.process.log.read_text()[-20_000:])  # shown if the test fails


@pytest.fixture
def small(open_path):
    """The same on a small volume of its own."""
    needed("redis-cli")
    with disk.own_disk(open_path / "data"):
        (open_path / "data").chmod(0o777)
        server = ReleaseRedis(open_path)
        with server.process:
            yield server
            print(server.process.log.read_text()[-20_000:])


def client(server):
    return server.process.client(username="penstock", password=server.passwords["penstock"])


@contextmanager
def writes(server):
    """Writes beside the body; gives the errors that are no refusal for lack of space."""
    mine, ended, failures = client(server), threading.Event(), []

    def write():
        while not ended.wait(0.002):
            try:
                mine.set("penstock:x", "x" * 1000)
            except OutOfMemoryError:
                continue
            except RedisError as error:
                failures.append(error)

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        yield failures
        ended.set()
        writing.result()


@ON_A_DISK
def test_a_backup_that_does_not_fit_is_refused(small):
    client(small).set("penstock:kept", "1")
    with writes(small) as failures:
        refused = small.attempt("restore", b"REDIS0" + bytes(200 * 2**20))
    assert refused.returncode == 1
    assert b"restore: the backup does not fit: after " in refused.stderr, refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert failures == []
    assert small.process.process.poll() is None
    assert not list((small.folder / "data").glob("restore*"))
    assert client(small).get("penstock:kept") == "1"


def test_a_backup_is_private_and_leaves_no_mark(server):
    client(server).set("penstock:kept", "1")
    backup = server.command("backup")
    server.command("restore", backup)
    server.process.process.wait(20)
    left = server.folder / "data/restore.rdb"
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    assert left.read_bytes() == backup[:-40], "without the mark with which a transfer ends"
