"""Owns the reward `python:` with `needs`: a functions' server judges.

Must not run a function itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from services.settings.rewards.kinds import PythonReward, RemoteReward
from verifier.remote.endpoint import FIRST_PAUSE_S, Endpoint, Outgoing
from verifier.remote.faults import ServiceFaultError
from verifier.remote.functions.files import digest_of
from verifier.remote.functions.place import FunctionsPlace
from verifier.remote.functions.warm import GRACE_S, START_S, TextLimits
from verifier.remote.http_judge import Entries, judged_in_batches, signed_headers
from verifier.remote.protocol import Decision, decisions, encoded_batch, parsed
from verifier.verifiers.base import Candidate

BATCH = 8
CONCURRENCY = 8
ATTEMPTS = 3
ROUNDS = 8
"""How often files are uploaded before a request is judged: each replica of the server keeps its own."""


class FunctionJudge:
    """Judges by a function on a functions' server, for one event loop.

    `files`: the contents of the files beside the recipe by name (`./rewards.py`).
    """

    def __init__(
        self,
        options: PythonReward,
        files: Mapping[str, bytes],
        place: FunctionsPlace,
        limits: TextLimits | None = None,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = options.function
        self._limits = limits or TextLimits()
        self._contents = {digest_of(content): content for content in files.values()} if options.file else {}
        self._digests = {name: digest_of(content) for name, content in files.items()} if options.file else {}
        self._secret = place.secret
        # The texts of a request may wait for each other, and the first one for the import.
        timeout_s = START_S + BATCH * (self._limits.wall_s + GRACE_S)
        remote = RemoteReward(url=place.url, timeout_s=timeout_s, attempts=ATTEMPTS, concurrency=CONCURRENCY)
        self._endpoint = Endpoint(
            "python.function",
            remote,
            socket=place.socket,
            hidden=(place.secret,),
            first_pause_s=first_pause_s,
            clock=clock,
        )

    async def judge_all(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """The decision on each candidate in turn. A fault of the server or of a text is an UndecidedError in it."""
        return await judged_in_batches(candidates, BATCH, self._judge)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._endpoint.aclose()

    async def _judge(self, entries: Entries) -> list[Decision]:
        limits = {"cpu_s": self._limits.cpu_s, "wall_s": self._limits.wall_s}
        body = encoded_batch(list(entries.values()), function=self._function, files=self._digests, **limits)
        for _ in range(ROUNDS):
            answer = parsed(self._endpoint.host, await self._send("/judge", body))
            missing = answer.get("missing") if isinstance(answer, Mapping) else None
            if not missing:
                return decisions(self._endpoint.host, answer, [str(place) for place in entries])
            for digest in missing:
                await self._upload(digest)
        raise ServiceFaultError(f"{self._endpoint.host}: it lacks the files of {self._function} after {ROUNDS} uploads")

    async def _upload(self, digest: object) -> None:
        content = self._contents.get(digest) if isinstance(digest, str) else None
        if content is None:
            raise ServiceFaultError(f"{self._endpoint.host}: it asks for a file that {self._function} does not have")
        await self._send(f"/files/{digest}", content, "PUT")

    async def _send(self, path: str, body: bytes, method: str = "POST") -> bytes:
        return await self._endpoint.send(Outgoing(body, signed_headers(body, self._secret), path, method))
