"""Every service starts alone, and says in one line why it cannot."""

import os
import subprocess
import sys

import pytest

MODULES = ["services.sampler", "verifier", "rollout", "learner"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("url", "says"),
    [(None, "run 'no-such-run' does not exist"), ("redis://:secret@127.0.0.1:1/0", "127.0.0.1:1/0 cannot be reached")],
)
def test_obstacles_are_one_line(redis_url, module, url, says):
    command = [sys.executable, "-m", module, "--run", "no-such-run", "--redis", url or redis_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[-1]
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_api_alone_names_an_unreachable_redis():
    command = [sys.executable, "-m", "services.api", "--redis", "redis://:secret@127.0.0.1:1/0", "--patience", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "secret" in done.stderr) == (2, False)
    assert "127.0.0.1:1/0 cannot be reached within 1.5 s: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["services.api", "services.sampler"])
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("redis://:secret@127.0.0.1:1/0", "Redis at redis://127.0.0.1:1/0 cannot be reached within 10 s: "),
        ("redis://:secret@127.0.0.1:x/0", "--redis (PENSTOCK_REDIS): 'redis://127.0.0.1:x/0' is not accepted ("),
        ("", "--redis: nothing is given, and PENSTOCK_REDIS is not set; redis://host:port/db, "),
    ],
)
def test_the_address_of_redis_defaults_to_the_variable(module, address, says):
    command = [sys.executable, "-m", module, *(["--run", "no-such-run"] if module != "services.api" else [])]
    environment = {**os.environ, "PENSTOCK_REDIS": address}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, "secret" in done.stderr, "Traceback" in done.stderr) == (2, False, False)
    assert says in done.stderr.splitlines()[-1]
