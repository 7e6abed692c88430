"""The chart's start script on a small volume that fills: the server refuses writes, lives, and starts again."""

import fcntl
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import exceptions as redis_errors

from tests.chaos import disk
from tests.harness.programs import needed
from tests.harness.servers.redis_servers import PASSWORDS, scripted_server
from tests.harness.servers.release_redis import ReleaseRedis

pytestmark = [pytest.mark.skipif(bool(disk.refusal()), reason=disk.refusal() or ""), pytest.mark.timeout(120)]

WAIT_S = 40.0
BLOCK, PACE_S = b"x" * 100_000, 0.02
"""5 MB/s."""
FAST_S = 20.0e6
"""Bytes a second: more than 10 % of this volume."""


@contextmanager
def own_volume(folder, **changes):
    """A server on a volume of its own, and a client of user penstock."""
    needed("redis-cli")
    with disk.own_disk(folder / "data"), scripted_server(folder, **changes) as server:
        yield server, server.client(username="penstock", password=PASSWORDS["penstock"])


def until(holds, what):
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


def await_looks(folder, count):
    """Each fifth one is at what a restore has left and at the append-only file."""
    looked, seen = folder / "users.acl.looked", set()
    until(lambda: seen.add(looked.stat().st_mtime_ns) or len(seen) > count, f"the watch looks {count} times")


def refusal(redis, *command):
    try:
        redis.execute_command(*command)
    except redis_errors.ResponseError as error:
        return "OOM" if isinstance(error, redis_errors.OutOfMemoryError) else str(error).partition(" ")[0]
    return ""


def test_a_server_whose_volume_fills_refuses_writes_and_lives(open_path):
    with own_volume(open_path) as (server, mine):
        until((open_path / "data/reserve").exists, "no space is kept for the next start")
        mine.set("penstock:kept", "1")
        filler = disk.fill(open_path / "data", 16_000)
        until(lambda: refusal(mine, "SET", "penstock:x", "1") == "OOM", "data that grow are refused")
        assert mine.delete("penstock:none") == 0, "work in flight drains"
        filler.unlink()
        filler = disk.fill(open_path / "data", 1_000)
        until(lambda: refusal(mine, "DEL", "penstock:none") == "NOREPLICAS", "all writes are refused")
        assert mine.get("penstock:kept") == "1"
        filler.unlink()
        until(lambda: refusal(mine, "SET", "penstock:x", "1") == "", "all writes are accepted again")
        assert server.process.poll() is None
        log = server.log.read_text()
        assert log.count("redis: volume full") == 1, log
        assert "redis: volume open" in log.partition("redis: volume full")[2], log


def test_a_server_killed_on_a_full_volume_starts_again(open_path):
    with own_volume(open_path) as (server, mine):
        until((open_path / "data/reserve").exists, "no space is kept for the next start")
        mine.set("penstock:kept", "1")
        (open_path / "data/temp-rewriteaof-1.aof").write_bytes(b"left by a killed rewriting")
        filler = disk.fill(open_path / "data", 0)
        server.kill()
        server.start()
        until(lambda: refusal(mine, "PING") == "", "the server answers")
        assert mine.get("penstock:kept") == "1"
        assert "redis: the reserve on the volume was freed" in server.log.read_text()
        assert not (open_path / "data/reserve").exists()
        assert not list((open_path / "data").glob("temp-*"))
        assert refusal(mine, "SET", "penstock:x", "1") in ("OOM", "NOREPLICAS"), "refused from the first command on"
        filler.unlink()
        until(lambda: refusal(mine, "SET", "penstock:x", "1") == "", "all writes are accepted again")
        until((open_path / "data/reserve").exists, "space is kept again")


@pytest.mark.slow
def test_a_volume_that_the_file_itself_fills_is_emptied(open_path):
    """The watch rewrites the file of an open volume only above 64 MiB: later than this volume is short."""
    with own_volume(open_path) as (server, mine):
        disk.fill(open_path / "data", 40_000)
        written, refused, ends = 0, 0, time.monotonic() + WAIT_S
        while written < 60_000 * 1024:
            assert time.monotonic() < ends, f"only {written} bytes were accepted\n{server.log.read_text()}"
            if refusal(mine, "SET", f"penstock:{written % 7}", BLOCK):
                refused += 1
            else:
                written += len(BLOCK)
            time.sleep(PACE_S)
        assert refused
        assert "redis: rewriting the append-only file" in server.log.read_text()
        assert server.process.poll() is None


def write_for(mine, size, bytes_s):
    """Write until so many bytes were accepted, or data are refused; at the pace, whatever a write takes."""
    began, written = time.monotonic(), 0
    while written < size:
        mine.set(f"penstock:{written}", BLOCK)
        written += len(BLOCK)
        time.sleep(max(0.0, began + written / bytes_s - time.monotonic()))


def test_a_fast_writer_does_not_outrun_the_watch(open_path):
    with own_volume(open_path, REDIS_MAXMEMORY="900mb") as (server, mine):
        with pytest.raises(redis_errors.OutOfMemoryError):
            write_for(mine, 2**30, FAST_S)
        assert server.process.poll() is None
        log = server.log.read_text()
        assert "redis: volume short" in log
        assert "rewriting" not in log, "the data do not fit a second time"


def test_the_file_of_an_open_volume_is_rewritten(open_path):
    needed("redis-cli")
    left, lock = open_path / "data/restore.rdb", open_path / "users.acl.restore"
    with scripted_server(open_path) as server:
        mine = server.client(username="penstock", password=PASSWORDS["penstock"])
        lock.touch()
        lock.chmod(0o666)
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as a restore that ends the server
            left.touch()
            for _ in range(70):
                mine.set("penstock:x", b"x" * 2**20)
            await_looks(open_path, 6)
            assert "redis: rewriting" not in server.log.read_text(), "beside a restore"
            assert left.exists()
        until(lambda: mine.info("persistence")["aof_current_size"] < 2**26, "the file is rewritten")
        log = server.log.read_text()
        assert log.count("redis: rewriting the append-only file: it has 70 MiB, the data ") == 1, log
        assert "Starting automatic rewriting" not in log, "without a look at the free space"


def test_a_watch_that_has_ended_is_found_by_the_liveness_probe(open_path):
    needed("redis-cli")
    server = ReleaseRedis(open_path)
    with server.process:
        process, looked = server.process.process, open_path / "users.acl.looked"
        long_ago = time.time() - 70
        os.utime(looked, (long_ago, long_ago))
        until(lambda: server.attempt("alive").returncode == 0, "the watch looks")
        [watch] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(watch), signal.SIGKILL)
        assert server.attempt("alive").returncode == 0, "within the minute"
        os.utime(looked, (long_ago, long_ago))
        found = server.attempt("alive")
        text = b"redis: the watch has ended: no look at the volume for more than 60 s\n"
        assert (found.returncode, found.stderr) == (1, text)
        assert server.attempt("ping").returncode == 0, "clients are served until the restart"
        process.kill()
        process.wait(20)
        server.process.start()
        assert server.attempt("alive").returncode == 0
