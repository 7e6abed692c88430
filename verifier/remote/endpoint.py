"""Owns requests to one service: deadline, attempts, size bounds, circuit breaker, egress.

Must not know what is asked, nor follow a redirect, use a proxy or decompress an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from services.settings.faults import invalid
from services.settings.rewards.kinds import RemoteReward
from verifier.remote.breaker import CircuitBreaker
from verifier.remote.egress import check_host, resolved
from verifier.remote.faults import SHOWN_CHARACTERS, RemoteSetupError, ServiceFaultError, one_line

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
"""Of an answer."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
IDLE_S = 2.0
"""How long a connection is kept for the next request: less than servers keep it, commonly 5 s."""
SECRET_CHARACTERS = 8
"""A shorter secret is not hidden in answers: it would be found in anything, and is none."""
ABOUT_THE_REQUEST = frozenset({400, 413, 422})
"""Statuses that blame what was sent, not the service."""
PORTS = {"http": 80, "https": 443}
REPEATED = frozenset({429, *range(500, 600)})


class Meter(Protocol):
    """What the attempts of a request cost."""

    async def reserve(self) -> None:
        """Before each attempt. Raises if it may not be sent."""

    async def unspent(self) -> None:
        """After an attempt for which the service did no work."""


@dataclass(frozen=True)
class Outgoing:
    """A request: its body, what is computed for each attempt's headers, and the path below the service's address."""

    body: bytes
    headers: Callable[[], Mapping[str, str]]
    path: str = ""
    method: str = "POST"


class Endpoint:
    """One service, for one event loop. `field`: of the setting that names it, for error texts.

    `socket`: the path of a Unix socket to connect to instead of the URL's host. `hidden`: secrets that an answer may
    repeat; they are removed from what is received. Raises RemoteSetupError for a host that is not allowed.
    """

    def __init__(
        self,
        field: str,
        options: RemoteReward,
        *,
        allowed_hosts: frozenset[str] | None = None,
        socket: str | None = None,
        hidden: tuple[SecretStr, ...] = (),
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_host(field, options.host, allowed_hosts)
        self._url = _parsed_url(field, options.url)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
        self.host = options.host
        self._options = options
        self._socket = socket
        self._hidden = tuple(secret for secret in hidden if len(secret) >= SECRET_CHARACTERS)
        self._first_pause_s = first_pause_s
        self._breaker = CircuitBreaker(self.host, options.breaker_failures, options.breaker_s, clock)
        self._room = asyncio.Semaphore(options.concurrency)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=options.concurrency, keepalive_expiry=IDLE_S
        )
        # The transport's trust_env is about SSL_CERT_FILE, for certificates of an authority of your own; the client's
        # would also send requests to the environment's proxies.
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=True)
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=None, follow_redirects=False)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def send(self, outgoing: Outgoing, meter: Meter | None = None) -> bytes:
        """The body of the answer with status 200. Raises ServiceFaultError after the last attempt."""
        async with self._room:
            for attempt in range(1, self._options.attempts + 1):
                try:
                    with self._breaker.watching():
                        return await self._metered(outgoing, meter)
                except ServiceFaultError as fault:
                    if not fault.repeats or attempt == self._options.attempts:
                        raise
                    pause_s = self._pause(attempt, fault.wait_s)
                    log.warning("%s; retry %d of %d in %.1f s", fault, attempt, self._options.attempts - 1, pause_s)
                await asyncio.sleep(pause_s)
        raise AssertionError("a setting allows no attempt")

    def _pause(self, attempt: int, asked_s: float | None) -> float:
        """Seconds until the next attempt: what the service asked for, else doubled each time, at random above half."""
        if asked_s is not None:
            return min(asked_s, self._options.timeout_s)
        longest = min(self._first_pause_s * 2.0 ** (attempt - 1), LONGEST_PAUSE_S, self._options.timeout_s)
        return longest * random.uniform(0.5, 1.0)

    async def _metered(self, outgoing: Outgoing, meter: Meter | None) -> bytes:
        if meter is None:
            return await self._attempt(outgoing)
        await meter.reserve()
        try:
            return await self._attempt(outgoing)
        except ServiceFaultError as fault:
            if fault.unspent:
                await meter.unspent()
            raise

    async def _attempt(self, outgoing: Outgoing) -> bytes:
        timeout_s = self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
                response = await self._connected(outgoing, stack)
                self._check_head(response)
                body = await self._received(response)
        except TimeoutError:
            raise ServiceFaultError(
                f"{self.host}: no whole answer within {timeout_s:g} s (timeout_s)", repeats=True
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._fault(f"no connection: {_cause(error)}", repeats=True, unspent=True) from None
        except httpx.TransportError as error:
            raise self._fault(f"the connection broke: {_cause(error)}", repeats=True) from None
        self._check_status(response, body)
        return body

    async def _connected(self, outgoing: Outgoing, stack: AsyncExitStack) -> httpx.Response:
        """The head of the answer from the first of the host's addresses that accepts a connection."""
        url = self._url
        url = url.copy_with(path=url.path.rstrip("/") + outgoing.path) if outgoing.path else url
        port = url.port or PORTS[url.scheme]
        addresses = [self.host] if self._socket else await resolved(self.host, port)
        # Given here, because the URL holds an address: the name is what the certificate must be of.
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", **outgoing.headers()}
        for address in addresses:
            request = self._client.build_request(
                outgoing.method,
                url.copy_with(host=address),
                content=outgoing.body,
                headers=headers,
                extensions={"sni_hostname": self.host},
                timeout=httpx.Timeout(None, connect=self._options.timeout_s / len(addresses)),
            )
            try:
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if address == addresses[-1]:
                    raise
                continue
            stack.push_async_callback(response.aclose)
            return response
        raise AssertionError("a name resolved to no address")

    def _check_head(self, response: httpx.Response) -> None:
        if response.is_redirect or 300 <= response.status_code < 400:
            target = urlsplit(response.headers.get("location", "")).hostname or "another path of it"
            raise self._fault(
                f"it redirects (status {response.status_code}) to {target}: redirects are not followed; "
                "name the final address in url",
                unspent=True,
            )
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise self._fault(f"content-encoding: {encoding[:40]!r} is not valid: expected identity")

    async def _received(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise self._fault(f"its answer is too long: expected at most {MOST_BYTES >> 20} MiB")
        received = bytes(body)
        for secret in self._hidden:
            plain = secret.get_secret_value()
            escaped = json.dumps(plain)[1:-1]
            for form in {plain, escaped, escaped.replace("/", "\\/")}:
                received = received.replace(form.encode(), b"[secret]")
        return received

    def _check_status(self, response: httpx.Response, body: bytes) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        said = one_line(body[: 4 * SHOWN_CHARACTERS].decode(errors="replace"), SHOWN_CHARACTERS)
        raise self._fault(
            f"status {status}{f': {said}' if said else ''}",
            repeats=status in REPEATED,
            blamed=status not in ABOUT_THE_REQUEST,
            unspent=True,
            wait_s=retry_after(response.headers.get("retry-after"), datetime.now(UTC)),
        )

    def _fault(
        self,
        text: str,
        *,
        repeats: bool = False,
        blamed: bool = True,
        unspent: bool = False,
        wait_s: float | None = None,
    ) -> ServiceFaultError:
        return ServiceFaultError(f"{self.host}: {text}", repeats=repeats, blamed=blamed, unspent=unspent, wait_s=wait_s)


def _parsed_url(field: str, url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RemoteSetupError(invalid(field, url, f"an address of a server: {error}")) from None


def retry_after(header: str | None, now: datetime) -> float | None:
    """The seconds that a `Retry-After` header asks for, as a number or as a date; None without a valid one."""
    if not header:
        return None
    try:
        number = header.strip().isdecimal()
        seconds = float(header) if number else (parsedate_to_datetime(header) - now).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _cause(error: httpx.TransportError) -> str:
    return f"{error}" or type(error).__name__
