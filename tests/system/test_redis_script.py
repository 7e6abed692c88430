"""The chart's start script with the operating system's redis-server and redis-cli: probes, TLS, Sentinels with TLS."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from services.streams.connection.client import RedisUnavailableError, connect
from services.streams.connection.credentials import CA_FILE, PASSWORD_FILE, USERNAME
from tests.harness.free_ports import free_port
from tests.harness.programs import demanded
from tests.harness.servers.redis_servers import PASSWORDS, START_SCRIPT, Process, script_settings, scripted_server
from tests.system.certificates import make_certificates

pytestmark = pytest.mark.system

SHELLS = [("dash",), ("busybox", "sh")]


@pytest.fixture
def folder(open_path, monkeypatch):
    """A folder with the operating system's server on PATH; Penstock's variables name the user penstock."""
    binary = demanded("redis-server")
    demanded("redis-cli")  # called by the script's probes
    (open_path / "bin").mkdir()
    (open_path / "bin/valkey-server").symlink_to(binary)
    mounted = open_path / "mounted"
    mounted.write_text(PASSWORDS["penstock"])
    monkeypatch.setenv(USERNAME, "penstock")
    monkeypatch.setenv(PASSWORD_FILE, str(mounted))
    return open_path


def probe(folder, port, command, shell=("sh",)):
    """Whether the probe succeeds, and its output; it must end within the chart's time limit."""
    environment, _ = script_settings(folder, REDIS_PORT=str(port))
    began = time.monotonic()
    done = subprocess.run(
        [*shell, START_SCRIPT, command], env=environment, capture_output=True, text=True, timeout=10, check=False
    )
    assert time.monotonic() - began < 8.0
    assert len(done.stderr.splitlines()) == (done.returncode != 0)
    return done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_probes(folder, shell, tls):
    readable = shutil.copy(demanded(shell[0]), folder / shell[0])  # by the server's user
    shell = (str(readable), *shell[1:])
    if tls:
        make_certificates(folder / "tls")
    with scripted_server(folder, shell) as server:
        assert probe(folder, server.port, "ping", shell) == (True, "")
        assert probe(folder, server.port, "alive", shell) == (True, "")
        # A changed Secret must not make the pod unready before Redis uses the new password.
        (folder / "secret/penstock-password").write_text("another")
        assert probe(folder, server.port, "ping", shell) == (True, "")
        os.kill(server.process.pid, signal.SIGSTOP)
        assert probe(folder, server.port, "alive", shell) == (False, "redis: no answer\n")
        os.kill(server.process.pid, signal.SIGCONT)
    assert probe(folder, server.port, "ping", shell) == (False, "redis: not ready: no answer\n")
    assert probe(folder, server.port, "alive", shell) == (False, "redis: no answer\n")


def test_a_loading_server_is_alive_and_not_ready(folder):
    with scripted_server(folder) as server:
        mine = server.client(username="penstock", password=PASSWORDS["penstock"])
        with mine.pipeline(transaction=False) as pipe:
            for number in range(20_000):
                pipe.set(f"penstock:{number}", number)
            pipe.execute()
    command = [
        demanded("redis-server"),
        "--port",
        server.port,
        "--dir",
        folder / "data",
        "--save",
        "",
        "--appendonly",
        "yes",
        "--aclfile",
        folder / "users.acl",
        "--key-load-delay",
        "100",
        "--loading-process-events-interval-bytes",
        "1024",
    ]
    with Process(folder, [str(part) for part in command], server.port):
        assert probe(folder, server.port, "alive") == (True, "")
        ready, output = probe(folder, server.port, "ping")
        assert not ready
        assert output.startswith("redis: not ready: LOADING")


@pytest.mark.timeout(120)
async def test_tls(folder, monkeypatch):
    authority = make_certificates(folder / "tls")
    with scripted_server(folder) as server:
        url = f"rediss://127.0.0.1:{server.port}/0"
        # The system's authorities do not include the tests' own.
        with pytest.raises(RedisUnavailableError, match="certificate verify failed"):
            await connect(url)
        monkeypatch.setenv(CA_FILE, str(authority))
        redis = await connect(url)
        await asyncio.gather(*(redis.set(f"penstock:{number}", number) for number in range(100)))
        with pytest.raises(RedisUnavailableError, match="certificate verify failed: Hostname mismatch"):
            await connect(url.replace("127.0.0.1", "localhost"))
        with pytest.raises(RedisUnavailableError, match="cannot be reached within 2 s"):
            await connect(url.replace("rediss", "redis"), 2.0)
        # A new authority: the server restarts with its certificate, and the client's bundle is updated later.
        bundle = authority.read_text()
        make_certificates(folder / "tls")
        newer = authority.read_text()
        authority.write_text(bundle)
        server.stop()
        server.start()
        waiting = asyncio.create_task(redis.get("penstock:7"))
        await asyncio.sleep(0.7)
        assert not waiting.done()
        assert "certificate verify failed" in redis.get_retry().reason
        authority.write_text(newer)
        assert await asyncio.wait_for(waiting, 10.0) == b"7"
        await redis.aclose()


@pytest.mark.timeout(120)
async def test_a_renewed_certificate_is_served_without_a_restart(folder, monkeypatch):
    authority = make_certificates(folder / "tls")
    with scripted_server(folder) as server:
        url = f"rediss://127.0.0.1:{server.port}/0"
        monkeypatch.setenv(CA_FILE, str(authority))
        redis = await connect(url)
        make_certificates(folder / "tls")  # of another authority, which is in the same file
        ends = time.monotonic() + 20
        while "the mounted certificate has changed: it is served now" not in server.log.read_text():
            assert time.monotonic() < ends, server.log.read_text()
            await asyncio.sleep(0.1)
        again = await connect(url)
        assert await again.set("penstock:x", "1")
        assert await redis.get("penstock:x") == b"1", "a connection with the earlier certificate goes on"
        (folder / "tls/tls.crt").write_text("no certificate")
        while "has changed and cannot be used: the server keeps the earlier one" not in server.log.read_text():
            assert time.monotonic() < ends, server.log.read_text()
            await asyncio.sleep(0.1)
        assert probe(folder, server.port, "ping") == (True, "")
        await redis.aclose()
        await again.aclose()


@pytest.fixture
def watched_by_tls(folder):
    """A master, its replica and a Sentinel, all with TLS; and the authority's certificate."""
    authority = make_certificates(folder / "tls")
    binary = demanded("redis-server")
    files = [
        "--tls-cert-file",
        folder / "tls/tls.crt",
        "--tls-key-file",
        folder / "tls/tls.key",
        "--tls-ca-cert-file",
        authority,
        "--tls-auth-clients",
        "no",
        "--tls-replication",
        "yes",
    ]
    ports = [free_port() for _ in range(3)]
    servers = ports[:2]
    settings = folder / "sentinel.conf"
    lines = [
        f"port 0\ntls-port {ports[2]}\ndir {folder}\nsentinel monitor penstock 127.0.0.1 {servers[0]} 1",
        "sentinel down-after-milliseconds penstock 1500",
        "sentinel failover-timeout penstock 3000",
        *(f"{name[2:]} {value}" for name, value in zip(files[::2], files[1::2], strict=True)),
        "",
    ]
    settings.write_text("\n".join(lines))
    with ExitStack() as ending:
        started = []
        for number, port in enumerate(servers):
            of = ["--replicaof", "127.0.0.1", servers[0]] if number else []
            data = folder / f"data-{port}"
            data.mkdir()
            command = [binary, "--port", 0, "--tls-port", port, "--dir", data, "--save", "", *files, *of]
            started.append(ending.enter_context(Process(folder, [str(part) for part in command], port)))
        command = [binary, str(settings), "--sentinel"]
        started.append(ending.enter_context(Process(folder, command, ports[2])))
        yield *started, authority


@pytest.mark.timeout(120)
async def test_sentinels_by_tls(watched_by_tls, monkeypatch):
    master, _, sentinel, authority = watched_by_tls
    monkeypatch.setenv(CA_FILE, str(authority))
    monkeypatch.delenv(USERNAME)
    monkeypatch.delenv(PASSWORD_FILE)
    view = sentinel.client(ssl=True, ssl_ca_certs=str(authority))
    ends = time.monotonic() + 30
    while view.sentinel_master("penstock")["num-slaves"] != 1:
        assert time.monotonic() < ends
        await asyncio.sleep(0.1)
    redis = await connect(f"rediss+sentinel://127.0.0.1:{sentinel.port}/penstock/0")
    assert await redis.set("key", "value")
    await asyncio.sleep(1.0)
    master.kill()
    assert await redis.set("key", "newer")
    assert await redis.get("key") == b"newer"
    await redis.aclose()
