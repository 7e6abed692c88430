"""Owns the tests of the command line as a whole: how it ends, its help, the client's commands without the platform.

Must not start a gateway.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli.main import COMMANDS, GROUPS
from deploy.cli.reference import TARGET, reference
from penstock_client.cli.main import app as client_app
from penstock_client.cli.recipe import RecipeFileError, read_recipe
from penstock_client.cli.reporting import LOG
from penstock_client.cli.table import PLATFORM_COMMANDS, client_commands
from tests.deploy.command_line import NOWHERE, ROOT, penstock
from tests.harness.small_run import recipe_document
from tests.penstock_client.other_servers import answer, other_server, silent_server

SECRET = "a-secret-token"
CLIENT = [sys.executable, "-m", "penstock_client.cli.main"]


def client_only(*arguments: str) -> tuple[int, str]:
    """Run the command as an installation of the client alone has it."""
    result = CliRunner().invoke(client_app, list(arguments))
    return result.exit_code, result.output


def ended(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in which `run_command_line` is imported."""
    text = f"from penstock_client.cli.reporting import run_command_line\n{code}"
    environment = {**os.environ, "XDG_STATE_HOME": str(folder), "PENSTOCK_DEBUG": ""}
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_names_of_the_platforms_commands_are_known_to_the_client() -> None:
    assert sorted(PLATFORM_COMMANDS) == sorted([*(command.name for command in COMMANDS), *GROUPS])
    assert not {command.name for command in client_commands(read_recipe)} & set(PLATFORM_COMMANDS)


@pytest.mark.parametrize(
    "arguments", [["up"], ["plan", "recipe.yaml", "--price", "2"], ["algorithm", "diff", "--help"]]
)
def test_the_platforms_commands_say_what_they_need(arguments: list[str]) -> None:
    expected = (
        f"penstock: {arguments[0]}: needs the full installation of Penstock; this one has only the client of its API"
    )
    assert client_only(*arguments) == (2, f"{expected}\n")


def test_the_reference_is_what_the_code_says() -> None:
    assert TARGET.read_text() == reference(), "python -m deploy.cli.reference writes it"


@pytest.mark.parametrize("name", [command.name for command in client_commands(read_recipe)])
def test_help_is_readable_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, output = client_only(name, "--help")
    assert (status, max(map(len, output.splitlines())) <= 80) == (0, True)
    for option in ("--api", "--token-file", "--insecure"):
        assert option in output


def test_the_version_is_printed() -> None:
    assert penstock("--version") == (0, "penstock 0.1.0\n")
    own, client = (
        next(line for line in (ROOT / path).read_text().splitlines() if line.startswith("version = "))
        for path in ("pyproject.toml", "penstock_client/pyproject.toml")
    )
    assert own == client


def test_an_unexpected_exception_is_one_line_and_a_log(tmp_path: Path) -> None:
    done = ended("def app():\n    raise RuntimeError('odd\\x1b[2J')\nrun_command_line(app)", tmp_path)
    log = tmp_path / "penstock" / LOG
    expected = f"penstock: unexpected RuntimeError: odd\\x1b[2J; {log} has the log, and --debug prints it\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    assert ("RuntimeError: odd" in log.read_text(), log.stat().st_mode & 0o777) == (True, 0o600)
    assert log.read_text().startswith("Traceback")


def test_debug_prints_the_traceback(tmp_path: Path) -> None:
    code = (
        "from penstock_client.cli.app import build_app\nfrom penstock_client.cli.table import CliCommand\n"
        "def fails() -> None:\n    raise RuntimeError('odd')\nrun_command_line(build_app([CliCommand('x', fails)]))"
    )
    done = ended(code, tmp_path, "--debug", "x")
    assert (done.returncode, done.stderr.startswith("Traceback")) == (2, True)
    assert ended(code, tmp_path, "x").stderr.count("\n") == 1


def test_debug_shows_retries_and_no_token() -> None:
    full = answer(503, "application/problem+json", '{"detail": "Redis does not respond"}')
    with other_server(full) as server:
        given = [
            "--debug",
            "runs",
            "--api",
            server.url,
            "--token",
            SECRET,
            "--header",
            f"X-Key: {SECRET}",
        ]
        done = subprocess.run([*CLIENT, *given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("retry in")) == (2, "", 2)
    assert done.stderr.endswith("penstock: Redis does not respond\n")
    assert SECRET not in done.stderr


@pytest.mark.parametrize(
    ("body", "status"),
    [("raise KeyboardInterrupt", 130), ("raise SystemExit(3)", 3), ("raise BrokenPipeError", 141), ("pass", 0)],
)
def test_ends_are_quiet(body: str, status: int, tmp_path: Path) -> None:
    done = ended(f"def app():\n    {body}\nrun_command_line(app)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_a_closed_pipe_is_quiet() -> None:
    entries = [{"id": f"r-{number}", "state": "failed", "reason": "x" * 200} for number in range(5000)]
    with other_server(answer(200, "application/json", json.dumps({"runs": entries}))) as server:
        line = f"{' '.join(CLIENT)} runs --limit 5000 --api {server.url} | head -2; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    heading, first, status = done.stdout.splitlines()
    assert (heading.split(), first.split()[0]) == (["run", "state", "created", "reason"], "r-0")
    assert (done.stderr, status in ("1", "141")) == ("", True)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (">&-", "cannot be reached"),
        ("> /dev/full", "the output cannot be written: [Errno 28] No space left on device"),
    ],
)
def test_output_that_cannot_be_written(output: str, said: str) -> None:
    command = "--version" if "full" in output else "runs --api http://127.0.0.1:1"
    line = f"{' '.join(CLIENT)} {command} {output}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_130() -> None:
    with silent_server() as url:
        command = [*CLIENT, "show", "r", "--api", url]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,  # it starts no thread
        ) as process:
            try:
                connected(process)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=30)
            finally:
                process.kill()
    assert (process.returncode, output, errors.strip()) == (130, "", "")


def heed_interrupts() -> None:
    """A shell's background jobs, and so the tests in one, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def connected(process: subprocess.Popen[str]) -> None:
    """Wait until a process has a connection that its server has accepted."""
    ends = time.monotonic() + 30
    while psutil.CONN_ESTABLISHED not in {found.status for found in psutil.Process(process.pid).net_connections("tcp")}:
        assert time.monotonic() < ends, "the command does not connect"
        time.sleep(0.05)


def test_a_recipe_is_read_with_the_files_that_it_names(tmp_path: Path) -> None:
    rewards = {"all": ["math", {"python": {"function": "./nested/b.py:score", "needs": []}}]}
    document = recipe_document(
        "/model",
        data={"source": "jsonl", "path": "./rows.jsonl", "layout": "fields", "verifier": "python:./a.py:score"},
        verifier={"files": ["./words.py"], "rewards": {"mine": rewards, "judge": {"judge": {"rubric": "./rubric.md"}}}},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(document))
    with pytest.raises(RecipeFileError, match=r"recipe: './a.py' is not valid: expected a file in"):
        read_recipe(recipe, NOWHERE)
    (tmp_path / "nested").mkdir()
    names = ("./a.py", "./nested/b.py", "./rubric.md", "./words.py")
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n")
    found = read_recipe(recipe, NOWHERE)
    assert found.files == {name: f"# {name}\n" for name in names}
    assert (found.document, found.name) == (yaml.safe_load(yaml.safe_dump(document)), "tiny")


def test_what_is_no_recipe_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for text, said in (("a: [", "not valid YAML"), ("- x", "expected a mapping"), ("[" * 5000, "not valid YAML")):
        recipe.write_text(text)
        status, output = client_only("submit", str(recipe), "--api", NOWHERE)
        assert (status, said in output, output.count("\n")) == (2, True, 1), output
    assert client_only("submit", str(tmp_path / "absent"), "--api", NOWHERE)[0] == 2
    (tmp_path / "secret.py").symlink_to("/etc/passwd")
    recipe.write_text("{name: x, verifier: 'python:./secret.py:score'}")
    status, output = client_only("submit", str(recipe), "--api", NOWHERE)
    assert (status, "expected a file in" in output, "root:" in output) == (2, True, False)


@pytest.mark.parametrize(
    "given", [["cancel"], ["pause"], ["resume"], ["edit", "priority=1"], ["adopt"], ["scale", "--rollout", "1"]]
)
def test_what_changes_a_run_answers_as_json(given: list[str]) -> None:
    run = {"id": "r", "state": "running", "reason": "of a release [with] more", "added": {"later": 1}}
    with other_server(answer(202, "application/json", json.dumps(run))) as server:
        name, *rest = given
        status, output = client_only(name, "r", *rest, "--json", "--api", server.url)
    assert (status, json.loads(output)) == (0, run)


def test_a_new_token_is_printed_with_its_digest() -> None:
    status, output = client_only("token", "new")
    (_, token), (_, digest) = (line.split() for line in output.splitlines()[:2])
    assert (status, len(token) >= 40, hashlib.sha256(token.encode()).hexdigest()) == (0, True, digest)
