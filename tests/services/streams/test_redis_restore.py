"""The chart's `restore`: a backup that does not fit harms nothing, and one that was interrupted is installed once."""

import fcntl
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError, RedisError

from tests.chaos import disk
from tests.harness.programs import needed
from tests.harness.servers.redis_servers import PASSWORDS, ROOT, START_SCRIPT, Process, script_settings
from tests.harness.servers.release_redis import ReleaseRedis

pytestmark = pytest.mark.timeout(120)

WAIT_S = 40.0
ANSWER_S = "1"
"""Instead of 5: most of what these tests wait for."""

ON_A_DISK = pytest.mark.skipif(bool(disk.refusal()), reason=disk.refusal() or "")


@pytest.fixture
def server(open_path):
    needed("redis-cli")
    server = ReleaseRedis(open_path, REDIS_ANSWER_S=ANSWER_S)
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


def test_a_start_that_was_killed_keeps_what_the_backup_replaced(server):
    client(server).set("penstock:backup", "1")
    backup = server.command("backup")
    client(server).set("penstock:before", "1")
    server.restore(backup)
    data = server.folder / "data"
    replaced = (data / "appendonlydir.replaced").stat().st_ino
    server.process.kill()
    # As if the first start had been killed before its last step.
    (data / "restore.rdb").hardlink_to(data / "appendonlydir/appendonly.aof.1.base.rdb")
    server.process.start()
    assert not (data / "restore.rdb").exists()
    assert (data / "appendonlydir.replaced").stat().st_ino == replaced
    assert client(server).exists("penstock:backup", "penstock:before") == 1


def until(holds, what):
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


@contextmanager
def restoring(server, backup):
    """A restore that has received a backup and waits for the rest of it."""
    incoming = server.folder / "data/restore.rdb.new"
    with server.begin("restore") as command:
        try:
            command.stdin.write(backup)
            command.stdin.flush()
            until(lambda: incoming.exists() and incoming.stat().st_size == len(backup), "the backup is received")
            yield command
        finally:
            command.kill()


@contextmanager
def stopped(server):
    """The server does not answer, and has not ended."""
    server.process.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("received", "line"),
    [
        (False, b"restore: after 2 s the server does not answer: nothing has changed"),
        (True, b"has not ended (no answer): the backup is deleted, the server keeps its data"),
    ],
    ids=["before", "after"],
)
def test_a_server_that_does_not_end_keeps_all_writes(server, received, line):
    client(server).set("penstock:kept", "1")
    backup, data = server.command("backup"), server.folder / "data"
    server.environment["REDIS_PATIENCE_S"] = "2"
    if received:
        late = server.folder / "bin/rm"  # so that a line before the deletion is seen before it
        late.write_text('#!/bin/sh\nsleep 0.5\nexec /bin/rm "$@"\n')
        late.chmod(0o755)
        with restoring(server, backup) as command, stopped(server):
            command.stdin.close()
            said, (error, left) = [(text, list(data.glob("restore*"))) for text in command.stderr]
            assert said == (b"redis: the server ends, and starts with the backup\n", [data / "restore.rdb"])
            status = command.wait(WAIT_S)
    else:
        with stopped(server):
            refused = server.attempt("restore", backup)
        [error], left, status = refused.stderr.splitlines(), [], refused.returncode
    assert status == 1
    assert line in error
    assert left == list(data.glob("restore*")) == []
    client(server).set("penstock:later", "1")
    server.process.stop()
    server.process.start()
    assert client(server).exists("penstock:kept", "penstock:later") == 2


def test_a_server_that_answers_late_is_told_again_to_end(server):
    client(server).set("penstock:backup", "1")
    backup = server.command("backup")
    client(server).set("penstock:later", "1")
    with restoring(server, backup) as command:
        looked, seen = server.folder / "users.acl.looked", set()
        until(lambda: seen.add(looked.stat().st_mtime_ns) or len(seen) > 6, "each fifth look is at the restore")
        second = server.attempt("restore", backup)
        assert (second.returncode, second.stderr.count(b"another restore works")) == (1, 1), second
        assert (server.folder / "data/restore.rdb.new").stat().st_size == len(backup)
        with stopped(server):
            command.stdin.close()
            assert command.stderr.readline() == b"redis: the server ends, and starts with the backup\n"
            command.terminate()
            assert command.stderr.readline() == b"redis: the server has been told to end: the restore goes on\n"
            assert command.stderr.readline() == b"redis: the server has not ended (no answer): it is told again\n"
        assert command.wait(WAIT_S) == 0
    server.process.process.wait(20)
    server.process.start()
    assert client(server).exists("penstock:backup", "penstock:later") == 1


def locked(server, kind=fcntl.LOCK_EX):
    """Whether the lock of restores is not free; for a shared one, whether a restore has it."""
    with (server.folder / "users.acl.restore").open() as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_a_killed_restore_left_is_deleted(server):
    data, log = server.folder / "data", server.process.log
    client(server).set("penstock:kept", "1")
    with restoring(server, b"REDIS0") as command:
        command.kill()
        command.wait(WAIT_S)
        assert not locked(server, fcntl.LOCK_SH), "its dd, which waits for the rest, must not keep its lock"
    with stopped(server):
        until(lambda: not locked(server), "the watch's present look ends")
        (data / "restore.rdb").write_bytes(b"REDIS0")  # by one that was killed before it ended the server
        until(lambda: locked(server), "the watch asks whether the server has ended")
        waiting = server.begin("restore")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    assert b"standard input is not valid" in waiting.communicate(timeout=WAIT_S)[1], "it waits for the watch"
    until(lambda: not list(data.glob("restore*")), "a later start must not install it, and the watch rewrites again")
    for name in ("restore.rdb.new", "restore.rdb"):
        assert f"redis: {data}/{name} was left by a restore that was killed, and is deleted" in log.read_text()
    assert client(server).get("penstock:kept") == "1"


def test_restores_follow_each_other_at_once_in_busybox(open_path):
    """Its `timeout` leaves a process for up to a second after the command."""
    needed("redis-cli")
    (open_path / "bin").mkdir()
    for name in ("sh", "timeout"):
        shutil.copy(needed("busybox"), open_path / "bin" / name)
    server = ReleaseRedis(open_path)
    with server.process:
        for _ in range(3):
            assert b"standard input is not valid" in server.attempt("restore").stderr


@ON_A_DISK
def test_in_a_container_a_restore_says_so_and_can_be_undone(open_path):
    """A command has the namespace of the server's process, with which it is killed."""
    needed("redis-cli")
    environment, port = script_settings(open_path)
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", str(START_SCRIPT)]
    guide = (ROOT / "docs/operations/redis.md").read_text()
    back = re.search(r"F-redis-0 -- sh -c '(cd /data/.*)'\n", guide)[1].replace("/data", environment["REDIS_DATA"])
    with Process(open_path, command, port, environment) as container:
        mine = container.client(username="penstock", password=PASSWORDS["penstock"])

        def call(*arguments, given=b""):
            [first] = Path(f"/proc/{container.process.pid}/task/{container.process.pid}/children").read_text().split()
            inside = ["nsenter", "-t", first, "--pid", "--mount", "sh", *arguments]
            return subprocess.run(inside, env=environment, input=given, capture_output=True, timeout=60, check=False)

        def ended():
            container.process.wait(20)
            container.start()

        mine.set("penstock:kept", "1")
        backup = call(START_SCRIPT, "backup").stdout
        mine.set("penstock:later", "1")
        done = call(START_SCRIPT, "restore", given=backup)
        assert done.returncode in (-signal.SIGKILL, 137), done
        assert done.stderr == b"redis: the server ends, and starts with the backup\n"
        script = START_SCRIPT.read_text()  # after SHUTDOWN, a race with the end of the container would decide
        assert script.index("the server ends, and starts") < script.index("ask 'SHUTDOWN NOSAVE'")
        ended()
        assert mine.exists("penstock:kept", "penstock:later") == 1
        call("-c", back)
        ended()
        assert mine.exists("penstock:kept", "penstock:later") == 2
        assert call("-c", back).returncode != 0, "nothing to go back to"
        assert (open_path / "data/appendonlydir").is_dir()
        container.kill()  # `unshare` passes no other signal on
