"""Owns the reward `http:`: your own service judges.

Must not know how a request is repeated; the endpoint does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import SecretStr

from services.settings.rewards.kinds import HttpReward
from verifier.remote.endpoint import FIRST_PAUSE_S, Endpoint, Outgoing
from verifier.remote.faults import ServiceFaultError
from verifier.remote.protocol import Decision, decisions, encoded_batch, encoded_request, parsed
from verifier.remote.signature import REQUEST_HEADER, SIGNATURE_HEADER, secret_from, signature
from verifier.verifiers.base import Candidate, UndecidedError

Entries = Mapping[int, bytes]
"""The entries of one request by the place of their candidate."""


class HttpJudge:
    """Judges by your service, for one event loop.

    `allowed_hosts`: None allows any. Raises RemoteSetupError: its host is not allowed, its secret's variable is unset.
    """

    def __init__(
        self,
        options: HttpReward,
        *,
        allowed_hosts: frozenset[str] | None = None,
        environ: Mapping[str, str] = os.environ,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = options.batch
        self._secret = secret_from(environ, "http.secret", options.secret) if options.secret else None
        self._endpoint = Endpoint(
            "http.url",
            options,
            allowed_hosts=allowed_hosts,
            hidden=(self._secret,) if self._secret else (),
            first_pause_s=first_pause_s,
            clock=clock,
        )

    async def judge_all(self, candidates: Sequence[Candidate]) -> list[Decision]:
        """The decision on each candidate in turn. A fault of the service or of a text is an UndecidedError in it."""
        return await judged_in_batches(candidates, self._batch, self._judge)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._endpoint.aclose()

    async def _judge(self, entries: Entries) -> list[Decision]:
        body = encoded_batch(list(entries.values()))
        answer = await self._endpoint.send(Outgoing(body, signed_headers(body, self._secret)))
        document = parsed(self._endpoint.host, answer)
        return decisions(self._endpoint.host, document, [str(place) for place in entries])


def signed_headers(body: bytes, secret: SecretStr | None) -> Callable[[], dict[str, str]]:
    """What makes the headers of each attempt to send `body`: one request id, and the time and signature of each."""
    fixed = {"Content-Type": "application/json", REQUEST_HEADER: secrets.token_hex(16)}

    def headers() -> dict[str, str]:
        return fixed | ({SIGNATURE_HEADER: signature(secret, body, time.time())} if secret else {})

    return headers


async def judged_in_batches(
    candidates: Sequence[Candidate], batch: int, judge: Callable[[Entries], Awaitable[list[Decision]]]
) -> list[Decision]:
    """The decision on each candidate in turn, asked for in requests of at most `batch`, which run at once.

    A ServiceFaultError of a request is the decision on all of its texts.
    """
    decided: dict[int, Decision] = {}
    entries: dict[int, bytes] = {}
    for place, candidate in enumerate(candidates):
        try:
            entries[place] = encoded_request(place, candidate)
        except UndecidedError as error:
            decided[place] = error

    async def ask(part: Entries) -> None:
        try:
            decided.update(zip(part, await judge(part), strict=True))
        except ServiceFaultError as fault:
            decided.update((place, UndecidedError(str(fault))) for place in part)

    places = list(entries)
    async with asyncio.TaskGroup() as requests:
        for start in range(0, len(places), batch):
            requests.create_task(ask({place: entries[place] for place in places[start : start + batch]}))
    return [decided[place] for place in range(len(candidates))]
