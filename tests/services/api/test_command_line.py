"""Every service can start alone, and reports in one line why it cannot start."""

import os
import subprocess
import sys

import pytest

from tests.harness.program_starts import Start, started

MODULES = ["services.sampler", "verifier", "rollout", "learner"]
UNKNOWN = (None, "run 'no-such-run' does not exist")
UNREACHABLE = ("redis://:secret@127.0.0.1:1/0", "127.0.0.1:1/0 cannot be reached")


@pytest.mark.parametrize(
    ("module", "url", "message"),
    [
        ("services.sampler", *UNKNOWN),
        ("verifier", *UNKNOWN),
        # These import torch first; whole runs start them as well.
        *(pytest.param(module, *UNKNOWN, marks=pytest.mark.slow) for module in ("rollout", "learner")),
        # Ten seconds each; a sampler's quick case is below.
        *(pytest.param(module, *UNREACHABLE, marks=pytest.mark.slow) for module in MODULES),
    ],
)
def test_a_failed_start_is_one_line(redis_url, module, url, message):
    command = [sys.executable, "-m", module, "--run", "no-such-run", "--redis", url or redis_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def access(tmp_path):
    """Variables that name an access file; without one the API does not start."""
    (tmp_path / "access.json").write_text("{}")
    return {"PENSTOCK_ACCESS": str(tmp_path / "access.json")}


def test_api_alone_names_an_unreachable_redis(access):
    command = [sys.executable, "-m", "services.api", "--redis", "redis://:secret@127.0.0.1:1/0", "--patience", "1.5"]
    environment = {**os.environ, **access}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, "secret" in done.stderr) == (2, False)
    assert "127.0.0.1:1/0 cannot be reached within 1.5 s: " in done.stderr.splitlines()[-1]


UNREACHABLE = ("redis://:secret@127.0.0.1:1/0", "Redis at redis://127.0.0.1:1/0 cannot be reached within 10 s: ")
INVALID = (
    "redis://:secret@127.0.0.1:x/0",
    "--redis (PENSTOCK_REDIS): 'redis://127.0.0.1:x/0' is not valid: expected redis://",
)
MISSING = ("", "--redis: no value, and PENSTOCK_REDIS is not set; expected redis://host:port/db, ")


@pytest.mark.parametrize(
    ("module", "cases"),
    [
        ("services.sampler", (UNREACHABLE, INVALID, MISSING)),
        ("services.api", (INVALID, MISSING)),
        pytest.param("services.api", (UNREACHABLE,), marks=pytest.mark.slow),
    ],
)
def test_the_address_of_redis_defaults_to_the_variable(module, cases, access):
    arguments = ["--run", "no-such-run"] if module != "services.api" else []
    ends = started(module, [Start(arguments, {**access, "PENSTOCK_REDIS": address}) for address, _ in cases])
    for (_, message), (status, _, errors) in zip(cases, ends, strict=True):
        assert (status, "secret" in errors, "Traceback" in errors) == (2, False, False)
        assert message in errors.splitlines()[-1]
