"""Owns the tests of where a token comes from, and that it is shown nowhere.

Must not start a gateway.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_client.access import TOKEN_VARIABLE, find_token, is_loopback, read_header, stack_token_file
from penstock_client.cli.commands.arguments import RUN_ID
from penstock_client.cli.connection import ApiConnection
from penstock_client.errors import AccessError
from services.api.access.local_token import token_path
from services.streams.keys import RUN_ID as PLATFORM_RUN_ID
from tests.deploy.command_line import penstock
from tests.penstock_client.other_servers import answer, other_server

HERE = "http://127.0.0.1:8470"
SECRET = "a-very-secret-token"


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The state folder of the user, without a token; and no token in the environment."""
    for name in (TOKEN_VARIABLE, "PENSTOCK_TOKEN_FILE", "PENSTOCK_API"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "penstock").mkdir()
    return tmp_path / "penstock"


def written(path: Path, text: str = f"{SECRET}\n", mode: int = 0o600) -> Path:
    """A file with this text and mode."""
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_found_in_a_fixed_order(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token(HERE) is None
    written(state / "token-8470", "of-the-stack")
    assert find_token(HERE) == find_token("http://localhost:8470") == "of-the-stack"
    assert find_token("http://127.0.0.1:8471") is None, "another stack"
    assert find_token("https://penstock.example.com:8470") is None, "only for an API on this machine"
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-variable")
    assert find_token(HERE) == find_token("https://penstock.example.com") == "of-the-variable"
    file = written(state / "mine", "of-the-file\nand more\n", 0o644)
    assert find_token(HERE, file=file) == "of-the-file"
    assert find_token(HERE, "given", file) == "given"


def test_the_stack_writes_where_the_client_looks(state: Path) -> None:
    assert stack_token_file(HERE) == token_path(8470) == state / "token-8470"
    assert stack_token_file("http://127.0.0.1").name == "token-80"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o700])
def test_a_token_file_that_others_can_read_is_refused(state: Path, mode: int) -> None:
    path = written(state / "token-8470", mode=mode)
    status, output = penstock("runs")
    expected = f"penstock: token file: {path} is not valid: expected mode 0600, not {mode:04o}\n"
    assert (status, output) == (2, expected)


def test_a_token_file_of_another_user_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(state / "token-8470")
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(AccessError, match=rf"expected a file of yours; user {owner} owns it"):
        find_token(HERE)


def test_a_link_is_no_token_file(state: Path) -> None:
    (state / "token-8470").symlink_to(written(state / "elsewhere"))
    with pytest.raises(AccessError, match="expected a regular file, and no link"):
        find_token(HERE)
    (state / "token-8470").unlink()
    os.mkfifo(state / "token-8470", 0o600)
    with pytest.raises(AccessError, match="expected a regular file, and no link"):
        find_token(HERE)


@pytest.mark.parametrize("token", ["", "with space", "line\nbreak", "ünicode", "tab\t", "nul\0"])
def test_what_no_header_can_hold_is_refused_unseen(token: str, state: Path) -> None:
    with pytest.raises(AccessError) as caught:
        find_token(HERE, f"{SECRET}{token} {SECRET}")
    assert SECRET not in str(caught.value)
    with pytest.raises(AccessError) as caught:
        read_header(f"X-Key: {SECRET}\n{token}\x00")
    assert SECRET not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line() -> None:
    status, output = penstock("runs", "--token-file", "/absent/token")
    assert (status, output) == (
        2,
        "penstock: --token-file: '/absent/token' cannot be read (No such file or directory)\n",
    )
    status, output = penstock("runs", "--token-file", "/dev/null")
    assert (status, output.startswith("penstock: --token-file: not a valid token")) == (2, True)


def test_help_and_errors_never_show_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    for arguments in (["--help"], ["--absent"], ["--api", "http://127.0.0.1:1"]):
        assert SECRET not in penstock("runs", *arguments)[1]
    assert SECRET not in repr(ApiConnection(HERE, SECRET, header=(SECRET,)))


def test_options_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_server(answer(200, "application/json", '{"runs": []}')) as server:
        given = ["--token", SECRET, "--header", "X-Auth: one", "--header", "CF-Access:two: three"]
        assert penstock("runs", "--api", server.url, *given) == (0, "no runs\n")
        [(_, path, headers)] = server.requests
        assert path.startswith("/v1/runs?limit=")
        assert (headers["authorization"], headers["x-auth"]) == (f"Bearer {SECRET}", "one")
        assert headers["cf-access"] == "two: three"
        status, output = penstock("runs", "--api", server.url, "--header", "no colon")
        assert (status, output) == (2, "penstock: --header: not valid: expected 'Name: value'\n")


def test_a_token_in_the_clear_is_warned_of() -> None:
    status, output = penstock("runs", "--api", "http://penstock.invalid", "--token", SECRET)
    assert (status, SECRET in output) == (2, False)
    assert output.startswith(
        "penstock: warning: the token is sent to http://penstock.invalid unencrypted: expected https"
    )


@pytest.mark.parametrize(
    ("url", "here"),
    [
        (HERE, True),
        ("http://127.9.9.9", True),
        ("http://[::1]:8470", True),
        ("http://localhost", True),
        ("http://0.0.0.0", False),
        ("http://localhost.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://10.0.0.1", False),
    ],
)
def test_loopback_is_this_machine_alone(url: str, here: bool) -> None:
    assert is_loopback(url) == here


def test_run_ids_are_those_of_the_platform() -> None:
    assert RUN_ID.pattern == PLATFORM_RUN_ID.pattern
