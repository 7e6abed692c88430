"""The embedded Redis and the stack's supervision, without Ray: what dies is started again, within a bound."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deploy.local.preflight import StackError
from deploy.local.stack import LocalStack
from deploy.local.valkey import DEATHS, EmbeddedValkey, drop_zeros
from services.streams.connection import connect

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
    ends = time.monotonic() + 5
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
        valkey.revive()
        print(f"up {time.monotonic() - began:.2f} s after the kill")
        assert valkey.url == url
        assert asyncio.run(entries(url)) == 50


def test_a_server_that_dies_again_and_again_is_given_up(valkey):
    for _ in range(DEATHS):
        kill(valkey)
        valkey.revive()
    kill(valkey)
    with pytest.raises(StackError, match=rf"died {DEATHS + 1} times in a row, each time within 10 s of its start"):
        valkey.revive()


def test_life_in_between_forgives_deaths(valkey, monkeypatch):
    monkeypatch.setattr("deploy.local.valkey.CALM_S", 0.2)
    for _ in range(DEATHS + 2):
        time.sleep(0.25)
        kill(valkey)
        valkey.revive()


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


def test_the_next_stack_waits_for_the_server_of_a_killed_one(tmp_path):
    """Two servers on one append-only file would spoil it; the first ends soon after the process that started it."""
    folder = tmp_path / "valkey"
    program = f"""
        from deploy.local.valkey import EmbeddedValkey
        from pathlib import Path
        import os, signal, time
        valkey = EmbeddedValkey(Path({str(folder)!r}))
        print(valkey.start(), valkey.pid, flush=True)
        os.kill(valkey.pid, signal.SIGSTOP)  # it is slow to end
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as first:
        pid = int(first.stdout.readline().split()[1])
        second = EmbeddedValkey(folder)
        try:
            with pytest.raises(StackError, match="another server uses"):
                second.start()
            first.kill()
            first.wait()
            os.kill(pid, signal.SIGCONT)
            assert asyncio.run(entries(second.start())) == 0
        finally:
            first.kill()
            second.stop()
            second.close()


class Head:
    """Stands in for Ray's head process: says what the real one says, and dies when it is told to."""

    PROGRAM = textwrap.dedent("""
        import json, os, sys, threading, time
        from http.server import BaseHTTPRequestHandler, HTTPServer
        port = int(sys.argv[sys.argv.index("--port") + 1])
        class Ready(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200); self.end_headers()
            def log_message(self, *_): pass
        server = HTTPServer(("127.0.0.1", port), Ready)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps({"phase": "ray", "text": "starting Ray"}), flush=True)
        print(json.dumps({"phase": "ready", "text": ""}), flush=True)
        if os.path.exists("fail"):
            print(json.dumps({"phase": "failed", "text": "the gateway is broken"}), flush=True)
            sys.exit(1)
        time.sleep(600)
    """)


SUPERVISED = """
    import deploy.local.stack as stack, sys, time, pathlib
    folder = pathlib.Path(sys.argv[1])
    program = folder / "head.py"
    real = stack.subprocess.Popen
    def popen(command, **options):
        return real([sys.executable, str(program), *command[3:]], cwd=folder, **options)
    stack.subprocess.Popen = popen
    with stack.LocalStack(folder, port=int(sys.argv[2]), report=lambda line: print(line, flush=True)) as one:
        print("PIDS", one._valkey.pid, one._head.pid, flush=True)
        try:
            while True:
                one.check_alive()
                print("PIDS", one._valkey.pid, one._head.pid, flush=True)
                time.sleep(0.1)
        except stack.StackError as error:
            print("STACK", error, flush=True)
"""
