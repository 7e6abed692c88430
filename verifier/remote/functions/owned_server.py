"""Owns a functions' server that is a child of this process, on a Unix socket in a private folder.

Must not give it anything of ours: its environment has a secret of its own, which nothing else uses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
from pydantic import SecretStr

from verifier.remote.faults import RemoteSetupError
from verifier.remote.functions.place import LOCAL_URL, FunctionsPlace, secret_on_pipe
from verifier.remote.functions.warm import user_environment

log = logging.getLogger(__name__)

START_S = 60.0
POLL_S = 0.05
STOP_S = 15.0
RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
SOCKET_CHARACTERS = 100
"""Of a Unix socket's path; the system's limit is 104 to 108."""


class FunctionsServer:
    """The server, for one event loop. A context manager, or `start` and `stop`.

    When it dies it is started again, at most `restarts` times within RESTARTS_WITHIN_S seconds; then the judgements
    that need it are unknown. It ends with the thread that started it.
    """

    def __init__(self, start_s: float = START_S, restarts: int = RESTARTS) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
        self._start_s = start_s
        self._restarts = restarts
        self._secret = SecretStr(secrets.token_hex(32))
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the server that runs now."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def __aenter__(self) -> FunctionsPlace:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> FunctionsPlace:
        """Start it and wait until it answers. Raises RemoteSetupError, OSError."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-functions-"))
        try:
            if len(str(self._socket)) > SOCKET_CHARACTERS:
                raise RemoteSetupError(
                    f"TMPDIR: {str(self._folder.parent)!r} is not valid: expected a shorter path, for a Unix socket"
                )
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._restarting())
        return FunctionsPlace(self._secret, LOCAL_URL, str(self._socket))

    async def stop(self) -> None:
        """End it with all its functions, and remove its folder."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if self._process is not None:
            await self._end(self._process)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "socket"

    async def _launch(self) -> None:
        self._socket.unlink(missing_ok=True)
        command = ["-P", "-m", "verifier.remote.functions", "--listen", f"unix:{self._socket}"]
        descriptor, variables = secret_on_pipe(self._secret)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                *("--parent", str(os.getpid()), "--folder", str(self._folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[descriptor],
                env=user_environment(os.environ) | variables,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        until = time.monotonic() + self._start_s
        while not await self._answers():
            if process.returncode is not None:
                raise RemoteSetupError(f"the functions' server ended at its start (status {process.returncode})")
            if time.monotonic() > until:
                raise RemoteSetupError(f"the functions' server did not answer within {self._start_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _answers(self) -> bool:
        transport = httpx.AsyncHTTPTransport(uds=str(self._socket))
        async with httpx.AsyncClient(transport=transport, timeout=2.0) as client:
            try:
                return (await client.get(f"{LOCAL_URL}/healthz")).status_code == httpx.codes.OK
            except httpx.TransportError:
                return False

    async def _restarting(self) -> None:
        """Start it again each time it dies, until that happens too often."""
        died: list[float] = []
        while True:
            assert self._process is not None
            code = await self._process.wait()
            now = time.monotonic()
            died = [*(when for when in died if now - when < RESTARTS_WITHIN_S), now]
            if len(died) > self._restarts:
                log.error(
                    "the functions' server died (status %d) %d times within %g s; it is not started again",
                    code,
                    len(died),
                    RESTARTS_WITHIN_S,
                )
                return
            log.warning(
                "the functions' server died (status %d); restart %d of at most %d within %g s",
                code,
                len(died),
                self._restarts,
                RESTARTS_WITHIN_S,
            )
            try:
                await self._launch()
            except (RemoteSetupError, OSError) as error:
                log.error("the functions' server: %s", error)
                if self._process.returncode is None:
                    await self._end(self._process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            log.warning("the functions' server did not end within %g s and is killed", STOP_S)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
