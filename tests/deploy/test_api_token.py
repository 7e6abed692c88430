"""The token of the laptop's API: in a private file for as long as the stack runs, and in no variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.api_token import ApiToken
from deploy.local.preflight import StackError
from services.api.access.local_token import read_token, token_path
from services.api.access.platform import platform_access


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_the_gateway_finds_the_token_by_its_file() -> None:
    token = ApiToken(8470)
    token.write()
    secret = read_token(token_path(8470))
    assert platform_access(token.environment)
    assert secret not in str(token.environment)
    assert secret not in repr(token)
    assert token.sign_in_link("http://127.0.0.1:8470") == f"http://127.0.0.1:8470/#token={secret}"
    token.remove()
    assert not token_path(8470).exists()


def test_a_stack_that_did_not_start_removes_no_other_ones() -> None:
    running, refused = ApiToken(8470), ApiToken(8470)
    running.write()
    refused.remove()
    assert token_path(8470).exists()


def test_a_place_that_cannot_be_written_is_one_line(state: Path) -> None:
    (state / "penstock").write_text("no folder")
    with pytest.raises(StackError, match=r"PENSTOCK_TOKEN_FILE: .* is not valid: expected a place") as refused:
        ApiToken(8470).write()
    assert "\n" not in str(refused.value)
