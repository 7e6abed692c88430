"""Owns the release's Redis in a test: the chart's start script with its commands, its Secret and its volume.

Must not decide what a test expects. `backup` needs redis-cli, and `restore` redis-check-rdb.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from tests.harness.servers.redis_servers import PASSWORDS, START_SCRIPT, Process, script_settings

COMMAND_S = 60.0
ACCEPTED = "the passwords of the mounted Secret have changed: they are accepted now"


class ReleaseRedis:
    """The chart's server. `process` is its pod's: a test that ends it has to start it again, as the kubelet does."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.passwords = dict(PASSWORDS)
        """User -> the password under its name in the Secret."""
        self.environment, port = script_settings(folder, **changes)
        self.folder, self._user = folder, 999 if os.geteuid() == 0 else None
        self._mounts = 0
        self._mount({})
        self.process = Process(folder, ["sh", str(START_SCRIPT)], port, self.environment, self._user)

    @property
    def port(self) -> int:
        """The server's port; a restart does not change it."""
        return self.process.port

    @property
    def url(self) -> str:
        """The address with the password of user penstock."""
        return f"redis://penstock:{quote(self.passwords['penstock'], safe='')}@127.0.0.1:{self.port}/0"

    @property
    def password_file(self) -> Path:
        """The mounted password of user penstock."""
        return self.folder / "secret/penstock-password"

    @property
    def keeper_password(self) -> str:
        """The password of the start script's own user, until the server's next start."""
        return Path(f"{self.environment['REDIS_USERS']}.keeper").read_text()

    def command(self, name: str, given: bytes = b"") -> bytes:
        """The output of a command of the start script, run in the server's container."""
        done = self.attempt(name, given)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def attempt(self, name: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A command that may fail."""
        return subprocess.run(
            ["sh", str(START_SCRIPT), name],
            env={**self.environment, "REDIS_PORT": str(self.port)},
            input=given,
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
            user=self._user,
        )

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        """A command that goes on; the caller gives it its input, and ends it."""
        return subprocess.Popen(
            ["sh", str(START_SCRIPT), name],
            env={**self.environment, "REDIS_PORT": str(self.port)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=self._user,
        )

    def _mount(self, keys: Mapping[str, str | None]) -> None:
        """Exchange the folder of the Secret at once, as the kubelet does: by a link to another one."""
        secret = self.folder / "secret"
        self._mounts += 1
        content = shutil.copytree(secret, self.folder / f"secret.{self._mounts}")
        for name, value in keys.items():
            if value is None:
                (content / name).unlink()
            else:
                (content / name).write_text(value)
        if not secret.is_symlink():
            shutil.rmtree(secret)
        link = self.folder / "secret.link"
        link.symlink_to(content)
        link.replace(secret)

    def set_secret(self, keys: Mapping[str, str | None]) -> None:
        """Change keys of the Secret, None removes one, and wait until the server accepts what it has now."""
        before = self.process.log.read_text().count(ACCEPTED)
        self._mount(keys)
        ends = time.monotonic() + COMMAND_S
        while self.process.log.read_text().count(ACCEPTED) == before:
            assert time.monotonic() < ends, self.process.log.read_text()[-4000:]
            time.sleep(0.1)

    def lose_volume(self) -> None:
        """A server on a new, empty volume."""
        self.process.kill()
        for part in (self.folder / "data").iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        self.process.start()

    def restore(self, backup: bytes) -> None:
        """Start with the backup."""
        self.command("restore", backup)
        self.process.process.wait(COMMAND_S)
        self.process.start()
