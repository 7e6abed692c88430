"""A functions' server for the tests of this folder, started as a cluster starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from verifier.remote.functions.place import FunctionsPlace

SECRET = "the-secret-of-the-functions-server"
OURS = {
    "PENSTOCK_REDIS_URL": "redis://:password@example",
    "AWS_SECRET_ACCESS_KEY": "an-aws-key",
    "USER_REWARD_KEY": "mine",
}


def connectable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionsPlace]:
    """Where the server is; it ends with all its functions after the module."""
    path = tmp_path_factory.mktemp("f") / "socket"
    command = [sys.executable, "-m", "verifier.remote.functions", "--listen", f"unix:{path}", "--processes", "16"]
    environ = (
        os.environ | OURS | {"PENSTOCK_FUNCTIONS_SECRET": SECRET, "PENSTOCK_FUNCTIONS_SECRET_FILE": "/nonexistent"}
    )
    with subprocess.Popen(command, env=environ) as server:
        try:
            until = time.monotonic() + 60
            while not connectable(path):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.02)
            yield FunctionsPlace(SecretStr(SECRET), socket=str(path))
        finally:
            server.terminate()
            assert server.wait(20) in (0, -15)
