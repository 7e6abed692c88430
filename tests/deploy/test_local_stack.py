"""The embedded Redis and the stack's supervision, without Ray: what dies is started again, within a bound."""

import asyncio
import os
import signal
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
    one = EmbeddedValkey(tmp_path / "valkey")
    one.start()
    yield one
    one.stop()
    one.close()


def kill(valkey):
    os.kill(valkey.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while valkey.alive:
        assert time.monotonic() < ends
        time.sleep(0.01)


async def entries(url, more=0):
    """How many entries the stream has, after adding some."""
    redis = await connect(url)
    for number in range(more):
        await redis.xadd("stream", {"m": f"{number} \0\0"})
    count = await redis.xlen("stream")
    await redis.aclose()
    return count


def test_killed_server_comes_back_on_its_port_with_its_data(valkey):
    url = valkey.url
    assert asyncio.run(entries(url, 50)) == 50
    for _ in range(3):
        kill(valkey)
        began = time.monotonic()
        valkey.restart()
        print(f"up {time.monotonic() - began:.2f} s after the kill")
        assert valkey.url == url
        assert asyncio.run(entries(url)) == 50


def test_a_server_that_dies_again_and_again_is_given_up(valkey, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.CALM_S", 300.0)
    for _ in range(DEATHS):
        kill(valkey)
        valkey.restart()
    kill(valkey)
    with pytest.raises(StackError, match=rf"died {DEATHS + 1} times in a row, each time within 300 s of its start"):
        valkey.restart()


def test_life_in_between_forgives_deaths(valkey, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.CALM_S", 0.2)
    for _ in range(DEATHS + 2):
        time.sleep(0.25)
        kill(valkey)
        valkey.restart()


def test_a_server_of_somebody_else_on_its_port_is_not_taken_for_it(valkey, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.ATTEMPTS", 1)
    port = int(valkey.url.rsplit(":", 1)[1].removesuffix("/0"))
    kill(valkey)
    command = [server_binary(), "--port", port, "--dir", tmp_path, "--save", "", "--bind", "127.0.0.1"]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as other:
        try:
            assert asyncio.run(entries(valkey.url, 1)) == 1
            with pytest.raises(StackError, match="does not restart"):
                valkey.restart()
        finally:
            other.terminate()


@pytest.mark.parametrize("zeros", [0, 5000, 200_000])
@pytest.mark.parametrize("torn", [0, 7])
def test_power_cut_leaves_what_was_written_whole(tmp_path, torn, zeros):
    """The last record is cut short, and the file is longer than what was written into it."""
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


def test_zeros_inside_a_record_stay(tmp_path):
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
    """Two servers on one append-only file would spoil it; the first ends soon after the process that started it."""
    folder = tmp_path / "valkey"
    program = f"""
        from deploy.local.valkey import EmbeddedValkey
        from pathlib import Path
        import os, signal, time
        valkey = EmbeddedValkey(Path({str(folder)!r}))
        valkey.start()
        os.kill(valkey.pid, signal.SIGSTOP)  # it is slow to end
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
    import sys, time
    from pathlib import Path
    import deploy.local.stack as stack

    stack.HEAD_MODULE = "tests.deploy.stand_in_head"
    with stack.LocalStack(Path(sys.argv[1]), port=int(sys.argv[2]), report=lambda line: print(line, flush=True)) as one:
        print("serving", flush=True)
        try:
            one.wait()
        except stack.StackError as error:
            print("given up:", error, flush=True)
"""


class Stack:
    """A stack in a process of its own, and what it says."""

    def __init__(self, folder, command, environment=None):
        self._log = folder / "said"
        self.port = free_port()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [str(part).format(port=self.port) for part in command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            )  # fmt: skip

    def said(self):
        return self._log.read_text()

    def until(self, condition, what, deadline_s=90.0):
        ends = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < ends, f"{what}: {self.said()}"
            time.sleep(0.02)

    def serves(self):
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def find(self, words):
        """The pid of the first process of the stack with these words on its command line; 0 when there is none."""
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if words in " ".join(one.cmdline()):
                    return one.pid
            except psutil.Error:
                continue
        return 0

    def kill(self, words, number=signal.SIGKILL):
        """Send a signal to that process; how long it takes until another one is there and the API serves."""
        victim, began = self.find(words), time.monotonic()
        assert victim, words
        os.kill(victim, number)
        self.until(lambda: self.find(words) not in (0, victim) and self.serves(), f"recovery from killing {words}", 240)
        return time.monotonic() - began

    def end(self):
        """Ctrl-C; what is left of its processes."""
        everything = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(90)
        return [one for one in everything if alive(one)]


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
def test_supervisor_starts_again_whatever_dies(tmp_path):
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.said(), "start")
        for _ in range(3):
            stack.kill("valkey-server")
        stack.kill("stand_in_head")
        server = stack.find("valkey-server")
        assert server, stack.said()  # to signal 0 would kill the tests themselves
        os.kill(server, signal.SIGKILL)
        stack.kill("stand_in_head")
        stack.until(lambda: stack.said().count("Ray is up again") == 2, "two starts of Ray")
        stack.until(lambda: stack.find("valkey-server"), "both at once")
        # A server that is killed while it starts is started again within the same go.
        said = stack.said()
        assert said.count("restarting it on its data") + said.count("Valkey did not restart") >= 4, said
        assert stack.said().count("head process exited with -9; restarting Ray") == 2
        assert stack.end() == []


@pytest.mark.timeout(300)
def test_a_head_that_says_it_gives_up_is_not_started_again(tmp_path):
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.said(), "start")
        (tmp_path / "runs" / "fail").touch()
        stack.process.wait(90)
        assert "given up: the gateway is broken (log: " in stack.said()
    with running(tmp_path, supervised(tmp_path)) as stack:  # it fails before it is ready
        stack.process.wait(90)
        assert "StackError: the gateway is broken (log: " in stack.said()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deaths", [FIRST_DEATHS, FIRST_DEATHS + 1])
def test_a_head_that_dies_before_it_is_ready_is_started_again_a_few_times(tmp_path, deaths):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "early-deaths").write_text("\n".join(["now"] * deaths))
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.until(lambda: "serving" in stack.said() or stack.process.poll() is not None, "start or end")
        assert stack.said().count("head process exited with 1; restarting Ray") == FIRST_DEATHS
        gave_up = f"Ray's head process exited with 1, {FIRST_DEATHS + 1} times in a row: " in stack.said()
        assert gave_up == (deaths > FIRST_DEATHS)
        assert ("serving" in stack.said()) != gave_up


@pytest.mark.timeout(240)
def test_a_head_that_dies_again_and_again_is_given_up(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "die").touch()
    with running(tmp_path, supervised(tmp_path)) as stack:
        stack.process.wait(90)
        assert f"Ray's head process exited with 3, {HEAD_DEATHS + 1} times in a row: " in stack.said()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_the_real_stack_survives_kills_of_redis_gateway_and_ray(tmp_path):
    command = [Path(sys.executable).parent / "penstock", "up", "--port", "{port}", "--runs", tmp_path / "runs"]
    with running(tmp_path, command) as stack:
        stack.until(lambda: "Penstock is up" in stack.said(), "start", 150)
        for words in ("valkey-server", "ray::Gateway", "deploy.local.head", "ray::Gateway"):
            print(f"{words}: served again {stack.kill(words):.1f} s after its kill")
        assert stack.end() == []
