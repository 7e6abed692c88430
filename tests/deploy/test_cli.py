"""Owns the tests of the command line: errors as one line, checks before the start, and a stack without leftovers.

Must not train.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from deploy.cli import machine_checks
from deploy.cli.commands.stack import demo_recipe
from deploy.local.preflight import GIB, StackError, check_memory, needed_bytes
from deploy.local.stack import LocalStack
from deploy.local.valkey import EmbeddedValkey
from services.settings import load_recipe, parse_recipe
from services.streams.connection.client import connect
from tests.deploy.command_line import NOWHERE, ROOT, penstock
from tests.harness.free_ports import free_port
from tests.harness.process_trees import alive
from tests.harness.small_run import recipe_document


def processes_of(runs: Path) -> list[psutil.Process]:
    """All processes of a stack: those with this runs folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENSTOCK_RUNS") == str(runs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or belongs to another user
    return found


def test_recipe_error_names_field_value_and_valid_values(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    document = recipe_document("/m", algorithm={"group_size": 0, "clip_heigh": 0.3})
    recipe.write_text(yaml.safe_dump(document))
    for command in (["validate"], ["submit", "--api", NOWHERE]):
        status, output = penstock(command[0], str(recipe), *command[1:])
        assert status == 2
        assert "algorithm.group_size: 0 is not valid: expected a number greater than 0" in output
        assert "algorithm.clip_heigh: 0.3 is not valid: expected a known field" in output


def test_packaged_recipe_is_valid_and_steps_are_whole() -> None:
    recipe = load_recipe(demo_recipe())
    assert recipe.limits.groups_per_step % recipe.learner.mini_batch_groups == 0
    booked = recipe.rollout.cpus * 2 + recipe.learner.cpus + recipe.verifier.cpus
    assert booked <= 2, "a second rollout replica must fit on two cores"
    assert penstock("validate", str(demo_recipe()))[0] == 0


def test_schema_is_json_schema_of_the_recipe() -> None:
    status, output = penstock("validate", "--schema")
    assert status == 0
    assert set(yaml.safe_load(output)["required"]) == {"name", "model", "limits"}


@pytest.mark.parametrize(
    "command",
    [
        ["runs"],
        ["show", "x"],
        ["watch", "x"],
        ["cancel", "x"],
        ["scale", "x", "--rollout", "2"],
        ["pause", "x"],
        ["resume", "x"],
        ["resume", "x", "--from", "2"],
        ["waits", "x"],
        ["dead", "x"],
    ],
)
def test_unreachable_api_is_one_line(command: list[str]) -> None:
    status, output = penstock(*command, "--api", NOWHERE)
    assert status == 2
    assert f"--api: {NOWHERE} cannot be reached" in output
    assert len(output.strip().splitlines()) == 1


def test_occupied_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, output = penstock("up", "--port", str(port), "--runs", str(tmp_path))
    assert status == 2
    assert output.strip() == (f"penstock: --port: 127.0.0.1:{port} is in use by another process: expected a free port")


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("localhost", "'localhost' is not valid: expected an IPv4 address such as 127.0.0.1 or 0.0.0.0"),
        ("::", "'::' is not valid: expected an IPv4 address such as 127.0.0.1 or 0.0.0.0"),
        ("192.0.2.1", "192.0.2.1 is not valid: expected an address of this machine"),
    ],
)
def test_bad_host_is_one_line(tmp_path: Path, host: str, problem: str) -> None:
    status, output = penstock("up", "--host", host, "--port", str(free_port()), "--runs", str(tmp_path))
    assert status == 2
    assert output.strip() == f"penstock: --host: {problem}"


def test_a_host_other_than_loopback_causes_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(stack: LocalStack) -> None:
        started.append(stack.api)
        raise StackError("not started in this test")

    monkeypatch.setattr(LocalStack, "start", start)
    # Stopping a stack ends all descendants of this process, including the Redis of other tests.
    monkeypatch.setattr(LocalStack, "stop", lambda stack: None)
    port = free_port()
    for host in ("0.0.0.0", "127.0.0.1"):
        status, output = penstock("up", "--host", host, "--port", str(port), "--runs", str(tmp_path))
        assert status == 2
        assert (f"warning: the API listens on {host}:{port} without TLS; " in output) == (host == "0.0.0.0")
    # This machine reaches both through loopback.
    assert started == [f"http://127.0.0.1:{port}"] * 2


def test_unreachable_redis_is_one_line_without_the_password(tmp_path: Path) -> None:
    status, output = penstock(
        "up", "--port", str(free_port()), "--runs", str(tmp_path), "--redis", "redis://:secret@127.0.0.1:1/0"
    )
    assert status == 2
    assert "Redis at redis://127.0.0.1:1/0 cannot be reached within 5 s" in output
    assert "secret" not in output


def test_missing_model_stops_the_demo_before_anything_starts(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_document(tmp_path / "absent")))
    status, output = penstock("demo", "--recipe", str(recipe), "--port", str(free_port()), "--runs", str(tmp_path))
    assert status == 2
    assert output.startswith(f"penstock: model.path: '{tmp_path / 'absent'}' is not valid: expected")


def test_memory_check_reports_needed_and_free() -> None:
    recipe = parse_recipe(recipe_document("/m", rollout={"kv_cache_mib": 64 * 2**20}))
    assert needed_bytes(recipe) > 64 * 2**10 * GIB
    with pytest.raises(StackError, match=r"run 'tiny' with its stack needs about 6\d+\.\d GiB; \d+\.\d GiB are"):
        check_memory(recipe)


def test_memory_of_a_run_that_only_evaluates_has_no_learner(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))  # two million parameters in half precision
    assert learner_needs(tmp_path, ranks=1, zero_stage=0) == 1.5 * GIB + 6 * 4 * 2_000_000


def test_memory_check_counts_what_each_rank_holds(tmp_path: Path) -> None:
    """Weights, gradients, Adam's two moments and the copy that DeepSpeed updates, in float32; sent, and staged."""
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))
    ranks, values = 2 * 1.5 * GIB, 4 * 2_000_000
    assert learner_needs(tmp_path, ranks=2, zero_stage=0) == ranks + (2 * 4 + 2) * values
    assert learner_needs(tmp_path, ranks=2, zero_stage=1) == ranks + (2 * 2 + 3 + 2) * values
    assert learner_needs(tmp_path, ranks=2, zero_stage=3) == ranks + (5 + 2) * values
    with_reference = learner_needs(tmp_path, {"kl_coefficient": 0.1}, ranks=2, zero_stage=0)
    assert with_reference == ranks + (2 * 5 + 2) * values


def learner_needs(folder: Path, algorithm: dict[str, float] | None = None, **learner: int) -> int:
    """What a run that trains needs beside one that only evaluates, in bytes."""
    training, evaluating = (
        needed_bytes(
            parse_recipe(
                recipe_document(folder, learner=learner, algorithm=algorithm or {}, limits={"rollout_steps": steps})
            )
        )
        for steps in (1, 0)
    )
    return training - evaluating


def test_doctor_finds_our_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "checks", lambda port: [machine_checks._own_packages])
    assert penstock("doctor") == (0, "ok    own packages: none is shadowed\n")


def test_doctor_reports_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "FEWEST_CORES", 10**6)
    monkeypatch.setattr(machine_checks, "checks", lambda port: [machine_checks._python, machine_checks._cores])
    status, output = penstock("doctor")
    assert (status, output.count("ok  "), output.count("FAIL")) == (1, 1, 1)
    assert "is not enough: expected 1000000" in output


def test_help_is_quick_and_imports_no_engine() -> None:
    def cpu_seconds() -> float:
        """CPU seconds of the child processes that have ended; time spent waiting for a core does not count."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = cpu_seconds()
    probe = (
        "import sys\nfrom deploy.cli.main import app\n"
        "heavy = {'ray', 'torch', 'vllm', 'deepspeed', 'transformers', 'matplotlib', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True, timeout=60)
    assert cpu_seconds() - before < 5.0  # 0.3 s on an idle machine


def test_embedded_valkey_keeps_its_data_and_ends(tmp_path: Path) -> None:
    async def count(url: str) -> int:
        redis = await connect(url)
        try:
            return int(await redis.incr("starts"))
        finally:
            await redis.aclose()

    for starts in (1, 2):
        server = EmbeddedValkey(tmp_path)
        try:
            assert asyncio.run(count(server.start())) == starts
        finally:
            server.stop()
            server.close()
        assert not server.alive


@contextmanager
def launched(runs: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`penstock up` in a new process, killed afterwards."""
    command = [sys.executable, "-m", "deploy.cli.main", "up", "--port", str(port), "--runs", str(runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stack:
        try:
            yield stack
        finally:
            stack.kill()


def read_until(stack: subprocess.Popen[str], start: str) -> list[str]:
    """Output lines up to the one that starts with `start`; the test's timeout limits the wait."""
    assert stack.stdout is not None
    lines: list[str] = []
    for line in stack.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"ended without {start!r}: {lines}")


def end(stack: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, float]:
    """Signal the stack; returns the exit status, the remaining output, and the seconds until it ended."""
    began = time.monotonic()
    stack.send_signal(number)
    time.sleep(0.2)
    stack.send_signal(number)  # a second Ctrl-C must not cut the stop short
    output, _ = stack.communicate(timeout=90)
    return stack.returncode, output, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(300)
def test_up_serves_the_api_and_sigint_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    with launched(tmp_path, port) as stack:
        lines = read_until(stack, "Penstock is up")
        print(lines[-1])
        assert penstock("runs", "--api", f"http://127.0.0.1:{port}") == (0, "no runs\n")
        status, output = penstock("cancel", "absent", "--api", f"http://127.0.0.1:{port}")
        assert (status, output.strip()) == (2, "penstock: run 'absent' does not exist")
        started = processes_of(tmp_path)
        assert any("raylet" in process.name() for process in started)
        status, output, seconds = end(stack, signal.SIGINT)
    print(f"stopped in {seconds:.1f} s")
    assert status == 0
    assert "stopped by SIGINT" in output
    assert seconds < 20
    assert processes_of(tmp_path) == []
    assert not [process for process in started if alive(process)]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("phase", "wait_s"), [("starting Redis", 0.0), ("starting Ray", 3.0)])
def test_sigterm_during_start_up_leaves_nothing(tmp_path: Path, phase: str, wait_s: float) -> None:
    with launched(tmp_path, free_port()) as stack:
        read_until(stack, phase)
        time.sleep(wait_s)
        status, output, seconds = end(stack, signal.SIGTERM)
    assert status == 0
    assert "stopped by SIGTERM" in output
    assert seconds < 20
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(240)
def test_a_killed_supervisor_ends_the_stack(tmp_path: Path) -> None:
    with launched(tmp_path, free_port()) as stack:
        read_until(stack, "starting the gateway")
    ends = time.monotonic() + 90
    while left := processes_of(tmp_path):
        assert time.monotonic() < ends, [process.cmdline() for process in left]
        time.sleep(0.5)
