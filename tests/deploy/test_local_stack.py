"""The embedded Redis and the stack's supervision, without Ray: dead processes are restarted, up to a limit."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.local.preflight import StackError
from deploy.local.stack import FIRST_DEATHS, HEAD_DEATHS
from deploy.local.valkey import DEATHS, EmbeddedValkey, drop_zeros, server_binary
from services.streams.connection.client import connect
from tests.harness.free_ports import free_port
from tests.harness.process_trees import alive

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def valkey(tmp_path):
    valkey = EmbeddedValkey(tmp_path / "valkey")
    valkey.start()
    yield valkey
    valkey.stop()
    valkey.close()


def kill(valkey):
    os.kill(valkey.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while valkey.alive:
        assert time.monotonic() < ends
        time.sleep(0.01)


async def entries(url, more=0):
    """The number of entries of the stream, after adding `more`."""
    redis = await connect(url)
    for number in range(more):
        await redis.xadd("stream", {"m": f"{number} \0\0"})
    count = await redis.xlen("stream")
    await redis.aclose()
    return count


def test_a_killed_server_restarts_on_its_port_with_its_data(valkey):
    url = valkey.url
    assert asyncio.run(entries(url, 50)) == 50
    for _ in range(3):
        kill(valkey)
        began = time.monotonic()
        valkey.restart()
        print(f"up {time.monotonic() - began:.2f} s after the kill")
        assert valkey.url == url
        assert asyncio.run(entries(url)) == 50


def answer_to(valkey, command):
    """The first line of the server's answer to a client that does not log in."""
    with socket.create_connection(("127.0.0.1", valkey.port), timeout=10) as client:
        client.sendall(command + b"\r\n")
        return client.recv(1000).splitlines()[0]


def test_the_server_shares_the_session_but_not_ctrl_c(valkey):
    """Linux shares processors out by session: alone in one, next to engines, the server waits for seconds."""
    assert os.getsid(valkey.pid) == os.getsid(0)
    assert os.getpgid(valkey.pid) != os.getpgid(0)


def test_the_server_answers_only_to_its_password(valkey):
    for command in (b"PING", b"KEYS *", b"CONFIG GET requirepass", b"AUTH wrong"):
        assert answer_to(valkey, command).startswith((b"-NOAUTH", b"-WRONGPASS")), command
    assert asyncio.run(entries(valkey.url)) == 0


def test_a_process_logs_in_with_the_password_file(valkey, monkeypatch):
    monkeypatch.setenv("PENSTOCK_REDIS_USERNAME", "of-another-server")
    for name, value in valkey.login.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(entries(valkey.address, 1)) == 1


def test_the_password_is_in_its_file_alone(valkey):
    password = valkey.password_file.read_text()
    assert len(password) == 64
    assert stat.S_IMODE(valkey.password_file.stat().st_mode) == 0o600
    assert password not in " ".join(psutil.Process(valkey.pid).cmdline())
    assert password not in " ".join(psutil.Process(valkey.pid).environ().values())
    assert password not in valkey.address
    files = [file for file in valkey.password_file.parent.rglob("*") if file.is_file()]
    assert [file for file in files if password.encode() in file.read_bytes()] == [valkey.password_file]


def test_each_start_has_a_new_password_and_the_same_data(tmp_path):
    passwords = set()
    for number in range(3):
        valkey = EmbeddedValkey(tmp_path / "valkey")
        try:
            assert asyncio.run(entries(valkey.start(), 1)) == number + 1
            passwords.add(valkey.password_file.read_text())
        finally:
            valkey.stop()
            valkey.close()
    assert len(passwords) == 3


def test_a_server_that_keeps_dying_is_an_error(valkey, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.CALM_S", 300.0)
    for _ in range(DEATHS):
        kill(valkey)
        valkey.restart()
    kill(valkey)
    with pytest.raises(StackError, match=rf"died {DEATHS + 1} times in a row, each time within 300 s of its start"):
        valkey.restart()


def test_deaths_with_a_long_life_in_between_are_not_counted(valkey, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.CALM_S", 0.2)
    for _ in range(DEATHS + 2):
        time.sleep(0.25)
        kill(valkey)
        valkey.restart()


def test_another_server_on_the_port_is_not_taken_for_valkey(valkey, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.ATTEMPTS", 1)
    kill(valkey)
    command = [server_binary(), "--port", valkey.port, "--dir", tmp_path, "--save", "", "--bind", "127.0.0.1"]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as other:
        try:
            assert asyncio.run(entries(valkey.address, 1)) == 1
            with pytest.raises(StackError, match="did not restart"):
                valkey.restart()
        finally:
            other.terminate()


@pytest.mark.parametrize("zeros", [0, 5000, 200_000])
@pytest.mark.parametrize("torn", [0, 7])
def test_a_power_failure_loses_only_incomplete_records(tmp_path, torn, zeros):
    """The last record is incomplete, and the file is longer than the data written to it."""
    valkey = EmbeddedValkey(tmp_path / "valkey")
    assert asyncio.run(entries(valkey.start(), 20)) == 20
    kill(valkey)
    valkey.close()
    [file] = (tmp_path / "valkey" / "appendonlydir").glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - torn)
    with file.open("ab") as records:
        records.write(bytes(zeros))
    again = EmbeddedValkey(tmp_path / "valkey")
    assert asyncio.run(entries(again.start())) == (19 if torn else 20)
    assert asyncio.run(entries(again.url, 1)) == (20 if torn else 21)
    again.stop()
    again.close()


def test_zeros_inside_a_record_are_kept(tmp_path):
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    file = folder / "appendonly.aof.1.incr.aof"
    body = b"*1\r\n$5\r\n\0\0\0\0\0\r\n"
    file.write_bytes(body)
    assert drop_zeros(tmp_path) == 0
    file.write_bytes(body + bytes(70_000))
    assert drop_zeros(tmp_path) == 70_000
    assert file.read_bytes() == body
    file.write_bytes(bytes(70_000))
    assert drop_zeros(tmp_path) == 70_000
    assert file.read_bytes() == b""


def test_the_next_stack_waits_for_the_server_of_a_killed_one(tmp_path, monkeypatch):
    """Two servers would corrupt the append-only file; the first one ends soon after the process that started it."""
    folder = tmp_path / "valkey"
    program = f"""
        from deploy.local.valkey import EmbeddedValkey
        from pathlib import Path
        import os, signal, time
        valkey = EmbeddedValkey(Path({str(folder)!r}))
        valkey.start()
        os.kill(valkey.pid, signal.SIGSTOP)  # it ends slowly
        print(valkey.pid, flush=True)
        time.sleep(300)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as first:
        pid = int(first.stdout.readline())
        second = EmbeddedValkey(folder)
        try:
            with pytest.raises(StackError, match="another server uses"):
                second.start()
            monkeypatch.setattr("deploy.local.valkey.STOP_S", 30.0)
            first.kill()
            first.wait()
            os.kill(pid, signal.SIGCONT)
            assert asyncio.run(entries(second.start())) == 0
        finally:
            first.kill()
            second.stop()
            second.close()


SUPERVISED = """
    import functools, sys, time
    from pathlib import Path
    import deploy.local.stack as stack

    stack.HEAD_MODULE = "tests.deploy.stand_in_head"
    report = functools.partial(print, flush=True)
    with stack.LocalStack(Path(sys.argv[1]), port=int(sys.argv[2]), report=report) as running:
        print("serving", flush=True)
        try:
            running.wait()
        except stack.StackError as error:
            print("failed:", error, flush=True)
"""


class Stack:
    """A stack in a new process, and its output."""

    def __init__(self, folder, command, environment=None):
        self._log = folder / "output"
        self.port = free_port()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [str(part).format(port=self.port) for part in command],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            )

    def output(self):
        return self._log.read_text()

    def until(self, condition, what, deadline_s=90.0):
        ends = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < ends, f"{what}: {self.output()}"
            time.sleep(0.02)

    def serves(self):
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def find(self, words):
        """The pid of the first process of the stack with these words in its command line; 0 if there is none."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if words in " ".join(process.cmdline()):
                    return process.pid
            except psutil.Error:
                continue
        return 0

    def kill(self, words, number=signal.SIGKILL):
        """Send a signal to that process; returns the seconds until a new one runs and the API answers."""
        victim, began = self.find(words), time.monotonic()
        assert victim, words
        os.kill(victim, number)
        self.until(lambda: self.find(words) not in (0, victim) and self.serves(), f"recovery from killing {words}", 240)
        return time.monotonic() - began

    def end(self):
        """Press Ctrl-C; returns the processes that are left."""
        everything = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(90)
        return [process for process in everything if alive(process)]


@contextmanager
def running(folder, command, environment=None):
    stack = Stack(folder, command, environment)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stack.end()


def supervised(folder):
    return [sys.executable, "-c", textwrap.dedent(SUPERVISED), folder / "runs", "{port}"]


@pytest.mark.timeout(300)
def test_supervisor_restarts_every_part_that_dies(tmp_path):
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.output(), "start")
        for _ in range(3):
            stack.kill("valkey-server")
        stack.kill("stand_in_head")
        server = stack.find("valkey-server")
        assert server, stack.output()  # signalling process 0 would kill the tests themselves
        os.kill(server, signal.SIGKILL)
        stack.kill("stand_in_head")
        stack.until(lambda: stack.output().count("Ray is up again") == 2, "two starts of Ray")
        stack.until(lambda: stack.find("valkey-server"), "both at once")
        # A server that is killed while it starts is restarted in the same attempt.
        output = stack.output()
        restarts = output.count("restarting it with its data") + output.count("Valkey did not restart")
        assert restarts >= 4, output
        assert stack.output().count("head process exited with -9; restarting Ray") == 2
        assert stack.end() == []


@pytest.mark.timeout(300)
def test_a_head_that_reports_failure_is_not_restarted(tmp_path):
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.output(), "start")
        (tmp_path / "runs" / "fail").touch()
        stack.process.wait(90)
        assert "failed: the gateway is broken (log: " in stack.output()
    with running(tmp_path, supervised(tmp_path)) as stack:  # it fails before it is ready
        stack.process.wait(90)
        assert "StackError: the gateway is broken (log: " in stack.output()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deaths", [FIRST_DEATHS, FIRST_DEATHS + 1])
def test_a_head_that_dies_early_is_restarted_a_few_times(tmp_path, deaths):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "early-deaths").write_text("\n".join(["now"] * deaths))
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.output() or stack.process.poll() is not None, "start or end")
        assert stack.output().count("head process exited with 1; restarting Ray") == FIRST_DEATHS
        failed = f"Ray's head process exited with 1, {FIRST_DEATHS + 1} times in a row: " in stack.output()
        assert failed == (deaths > FIRST_DEATHS)
        assert ("serving" in stack.output()) != failed


@pytest.mark.timeout(240)
def test_a_head_that_keeps_dying_is_an_error(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "die").touch()
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.process.wait(90)
        assert f"Ray's head process exited with 3, {HEAD_DEATHS + 1} times in a row: " in stack.output()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_the_real_stack_survives_kills_of_redis_gateway_and_ray(tmp_path):
    command = [Path(sys.executable).parent / "penstock", "up", "--port", "{port}", "--runs", tmp_path / "runs"]
    with running(tmp_path, command) as stack:
        stack.until(lambda: "Penstock is up" in stack.output(), "start", 150)
        for words in ("valkey-server", "ray::Gateway", "deploy.local.head", "ray::Gateway"):
            print(f"{words}: recovered {stack.kill(words):.1f} s after its kill")
        assert stack.end() == []
