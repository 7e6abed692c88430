"""Owns the tests of the command line: errors as one line, progress, curves, and a stack that leaves nothing behind.

Must not train.
"""

from __future__ import annotations

import io
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console

from deploy.cli.commands.stack import demo_recipe
from deploy.cli.curves import draw_curves
from deploy.cli.progress import Follower, closing_table, duration, evaluation_line, seconds_left, step_line
from deploy.cli.terminal import cell, plain
from deploy.local.preflight import GIB, StackError, check_memory, needed_bytes
from deploy.local.stack import LocalStack
from deploy.local.valkey import EmbeddedValkey
from services.contracts import EvaluationRecord, PassAt
from services.settings import load_recipe, parse_recipe
from tests.deploy.command_line import NOWHERE, ROOT, penstock
from tests.harness.free_ports import free_port
from tests.harness.process_trees import alive
from tests.harness.small_run import recipe_document


def processes_of(runs: Path) -> list[psutil.Process]:
    """Every process that carries this runs folder in its environment: all of a stack, wherever it hangs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENSTOCK_RUNS") == str(runs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours to look at
    return found


def test_recipe_error_names_field_value_and_what_is_accepted(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    document = recipe_document("/m", algorithm={"group_size": 1, "clip_heigh": 0.3})
    recipe.write_text(yaml.safe_dump(document))
    for command in (["validate"], ["submit", "--api", NOWHERE]):
        status, output = penstock(command[0], str(recipe), *command[1:])
        assert status == 2
        assert "algorithm.group_size: 1 is not valid: expected a number greater than or equal to 2" in output
        assert "algorithm.clip_heigh: 0.3 is not valid: expected no such field" in output


def test_packaged_recipe_is_valid_and_steps_are_whole() -> None:
    recipe = load_recipe(demo_recipe())
    assert recipe.limits.groups_per_step % recipe.learner.mini_batch_groups == 0
    booked = recipe.rollout.cpus * 2 + recipe.learner.cpus + recipe.verifier.cpus
    assert booked <= 2, "a second rollout replica joins on two cores"
    assert penstock("validate", str(demo_recipe()))[0] == 0


def test_schema_is_json_schema_of_the_recipe() -> None:
    status, output = penstock("validate", "--schema")
    assert status == 0
    assert set(yaml.safe_load(output)["required"]) == {"name", "model", "limits"}


@pytest.mark.parametrize(
    "command",
    [
        ["runs"], ["show", "x"], ["watch", "x"], ["cancel", "x"], ["scale", "x", "--rollout", "2"], ["pause", "x"],
        ["resume", "x"], ["resume", "x", "--from", "2"], ["waits", "x"], ["dead", "x"],
        ["dead", "x", "--redrive", "all"],
    ],
)  # fmt: skip
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
    ("host", "said"),
    [
        ("localhost", "'localhost' is not valid: expected an IPv4 address such as 127.0.0.1 or 0.0.0.0"),
        ("::", "'::' is not valid: expected an IPv4 address such as 127.0.0.1 or 0.0.0.0"),
        ("192.0.2.1", "192.0.2.1 is not valid: expected an address of this machine"),
    ],
)
def test_bad_host_is_one_line(tmp_path: Path, host: str, said: str) -> None:
    status, output = penstock("up", "--host", host, "--port", str(free_port()), "--runs", str(tmp_path))
    assert status == 2
    assert output.strip() == f"penstock: --host: {said}"


def test_a_host_beyond_loopback_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(stack: LocalStack) -> None:
        started.append(stack.api)
        raise StackError("far enough")

    monkeypatch.setattr(LocalStack, "start", start)
    # Ending a stack ends everything below this process, and with it the other tests' Redis.
    monkeypatch.setattr(LocalStack, "stop", lambda stack: None)
    port = free_port()
    for host in ("0.0.0.0", "127.0.0.1"):
        status, output = penstock("up", "--host", host, "--port", str(port), "--runs", str(tmp_path))
        assert status == 2
        assert (f"warning: the API has no authentication; every client that reaches {host}:{port} " in output) == (
            host == "0.0.0.0"
        )
    # This machine reaches both by loopback.
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


def test_memory_check_tells_needed_and_free() -> None:
    recipe = parse_recipe(recipe_document("/m", rollout={"kv_cache_mib": 64 * 2**20}))
    assert needed_bytes(recipe) > 64 * 2**10 * GIB
    with pytest.raises(StackError, match=r"run 'tiny' with its stack needs about 6\d+\.\d GiB; \d+\.\d GiB are"):
        check_memory(recipe)


def test_memory_of_a_run_that_only_evaluates_has_no_learner(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))  # two million parameters in half precision
    training, evaluating = (
        needed_bytes(parse_recipe(recipe_document(tmp_path, limits={"rollout_steps": steps}))) for steps in (1, 0)
    )
    assert training - evaluating == 1.5 * GIB + 5 * 4 * 2_000_000


def test_help_is_quick_and_imports_no_engine() -> None:
    def worked() -> float:
        """The CPU seconds of the processes that have ended: how long they waited for a core is not their doing."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = worked()
    probe = (
        "import sys\nfrom deploy.cli.main import app\n"
        "heavy = {'ray', 'torch', 'vllm', 'deepspeed', 'transformers', 'matplotlib', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True, timeout=60)
    assert worked() - began < 5.0  # 0.3 s on a quiet machine


def step(number: int, finished: float, **metrics: float) -> dict[str, Any]:
    """A rollout step as the API gives it, as far as the terminal reads it."""
    return {"id": f"{number}-0", "step": number, "learning_finished_at": finished, "metrics": metrics}


def test_time_left_is_the_mean_pace_times_the_steps_left() -> None:
    steps = [step(1, 100.0), step(2, 110.0), step(3, 130.0)]
    assert seconds_left(steps[:1], 12) is None
    assert seconds_left(steps, 12) == pytest.approx(15.0 * 9)
    assert [duration(one) for one in (3.6, 125, 3780)] == ["4s", "2m05s", "1h03m"]


def test_step_line_shows_metrics_and_admits_what_is_missing() -> None:
    line = step_line(
        step(3, 0.0, accuracy=0.314, reward=-0.372, response_length=5.25, groups_kept=8, groups_filtered=3,
             staleness_mean=0.5, staleness_max=1),
        12, 125.0,
    )  # fmt: skip
    assert line.split() == ["3/12", "0.31", "-0.37", "-", "-", "5.2", "8/3/-", "0.50/1", "-", "2m05s"]
    assert step_line(step(3, 0.0), None, None).split()[:2] == ["3", "-"], "a budget has no last step"


def evaluated(name: str, **fields: Any) -> dict[str, Any]:
    """An evaluation as the API gives it."""
    record = EvaluationRecord(
        name=name, version=0, newest_version=0, prompts=64, samples_per_prompt=4, accuracy=0.195, standard_error=0.02,
        pass_at=(PassAt(k=1, value=0.195, standard_error=0.02), PassAt(k=4, value=0.5, standard_error=0.06)),
        majority=0.25, majority_standard_error=0.05, unknown=0,
    )  # fmt: skip
    return record.model_copy(update=fields).model_dump(mode="json")


def test_follower_prints_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console())
    view: dict[str, Any] = {
        "id": "r", "created_at": 1000.0, "rollout_steps_total": 2, "state": "running", "reason": "ready", "alerts": [],
        "events": [{"service": "rollout", "phase": "service-ready", "text": "engine up", "at": 1012.0}],
        "evaluations": [evaluated("before")], "recipe": {"limits": {"response_tokens": None}},
    }  # fmt: skip
    follower.take(view, [step(1, 100.0, accuracy=0.2)])
    follower.take(view, [])
    assert follower.cursor == "1-0"
    lines = capsys.readouterr().out.splitlines()
    assert "[   12s] rollout: service-ready: engine up" in lines
    told = "held-out before: avg@4 0.195 ± 0.020, pass@4 0.500 ± 0.060, maj@4 0.250 ± 0.050 (version 0, 64 prompts)"
    assert lines.count(told) == 1
    assert sum("service-ready" in one for one in lines) == 1
    assert sum(one.startswith("  1/2") for one in lines) == 1
    assert sum("run is running: ready" in one for one in lines) == 1


def test_follower_shows_a_paused_run_with_its_reason_and_histogram(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console())
    view: dict[str, Any] = {
        "id": "r", "created_at": 1000.0, "rollout_steps_total": 2, "evaluations": [], "events": [], "alerts": [],
        "recipe": {"limits": {"response_tokens": None}},
    }  # fmt: skip
    starved = "64 groups judged since the last batch, 0 of 4 kept: the run pauses; correct answers 0:60 4:4"
    for state, reason, alerts in (
        ("running", "ready", []), ("paused", "starved\x1b[2J", [starved]), ("paused", "starved\x1b[2J", [starved]),
        ("running", "resumed", []),
    ):  # fmt: skip
        follower.take(view | {"state": state, "reason": reason, "alerts": alerts}, [])
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run is running: ready", "run is paused: starved\\x1b[2J", starved, "`penstock resume r` resumes it",
        "run is running: resumed",
    ]  # fmt: skip


def test_evaluation_line_admits_version_range_and_what_is_missing() -> None:
    line = evaluation_line(evaluated("step-5", set="aime", version=5, newest_version=7, unknown=3, dropped=1))
    assert line.endswith("(version 5-7, 64 prompts, 3 unknown, 1 dropped)")
    nothing = evaluated("after", prompts=0, accuracy=0.0, pass_at=(), majority=None, majority_standard_error=None)
    assert evaluation_line(nothing) == "held-out after: avg@4 -, maj@4 - (version 0, 0 prompts)"


def test_closing_table_has_a_row_an_evaluation_and_a_column_a_pass() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(closing_table({"id": "r", "evaluations": [evaluated("before"), evaluated("after", set="aime")]}))
    _, heading, aime, held_out = [
        line for line in console.export_text().splitlines() if "─" not in line and "━" not in line
    ]
    assert [cell.strip() for cell in heading.split("┃")[1:-1]] == [
        "set", "evaluation", "policy version", "prompts", "k", "avg@k", "pass@4", "maj@k",
    ]  # fmt: skip
    cells = ["0", "64", "4", "0.195 ± 0.020", "0.500 ± 0.060", "0.250 ± 0.050"]
    assert [cell.strip() for cell in aime.split("│")[1:-1]] == ["aime", "after", *cells]
    assert [cell.strip() for cell in held_out.split("│")[1:-1]] == ["held-out", "before", *cells]


def test_curves_are_a_png(tmp_path: Path) -> None:
    evaluations = [evaluated("before"), evaluated("after", version=2), evaluated("after", set="aime", version=2)]
    path = draw_curves("r", [step(1, 0.0, accuracy=0.2), step(2, 1.0, accuracy=0.3)], evaluations, tmp_path / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_embedded_valkey_keeps_its_data_and_ends(tmp_path: Path) -> None:
    def call(url: str, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=5) as server:
            server.sendall(command + b"\r\n")
            return server.recv(100)

    for command, answer in ((b"SET k v", b"+OK\r\n"), (b"GET k", b"$1\r\nv\r\n")):
        server = EmbeddedValkey(tmp_path)
        try:
            assert call(server.start(), command) == answer
        finally:
            server.stop()
            server.close()
        assert not server.alive


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï 漢字 🙂", "plain ünï 漢字 🙂"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x00\x7f\a\b\r\n\t", "\\x9b2J\\x00\\x7f\\x07\\x08\\r\\n\\t"),
        ("a\u202eb\u2066c\u200bd\u2028e\ufeff", "a\\u202eb\\u2066c\\u200bd\\u2028e\\ufeff"),
        ("\ud800\U000e0041", "\\ud800\\U000e0041"),
    ],
)
def test_what_a_terminal_would_obey_is_printed_as_its_escape(text: str, shown: str) -> None:
    assert plain(text) == shown
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    console.print(cell(f"[bold]{text}[/bold] :smile:"))
    assert console.export_text().rstrip("\n") == f"[bold]{shown}[/bold] :smile:"


@contextmanager
def launched(runs: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`penstock up` in a process of its own; it is gone afterwards."""
    command = [sys.executable, "-m", "deploy.cli.main", "up", "--port", str(port), "--runs", str(runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stack:
        try:
            yield stack
        finally:
            stack.kill()


def read_until(stack: subprocess.Popen[str], start: str) -> list[str]:
    """Output lines up to one that starts with `start`; the test's timeout bounds the wait."""
    assert stack.stdout is not None
    lines: list[str] = []
    for line in stack.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"ended without {start!r}: {lines}")


def end(stack: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, float]:
    """Signal the stack; exit status, what it still printed, seconds."""
    began = time.monotonic()
    stack.send_signal(number)
    time.sleep(0.2)
    stack.send_signal(number)  # an impatient second Ctrl-C must not cut the end short
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
        assert penstock("runs", "--api", f"http://127.0.0.1:{port}") == (0, "")
        status, output = penstock("cancel", "absent", "--api", f"http://127.0.0.1:{port}")
        assert (status, output.strip()) == (2, "penstock: run 'absent' does not exist")
        started = processes_of(tmp_path)
        assert any("raylet" in one.name() for one in started)
        status, output, seconds = end(stack, signal.SIGINT)
    print(f"stopped in {seconds:.1f} s")
    assert status == 0
    assert "stopped by SIGINT" in output
    assert seconds < 20
    assert processes_of(tmp_path) == []
    assert not [one for one in started if alive(one)]


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
def test_a_killed_supervisor_takes_the_stack_with_it(tmp_path: Path) -> None:
    with launched(tmp_path, free_port()) as stack:
        read_until(stack, "starting the gateway")
    ends = time.monotonic() + 90
    while left := processes_of(tmp_path):
        assert time.monotonic() < ends, [one.cmdline() for one in left]
        time.sleep(0.5)
