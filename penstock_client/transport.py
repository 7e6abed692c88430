"""Owns HTTP: one request with its deadlines, bounded and logged retries of what may be repeated, and lines of a stream.

Must not follow a redirect, so that no token reaches another host; nor log a header.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from penstock_client.access import checked_address, checked_headers, checked_token, is_loopback
from penstock_client.answers import read_answer
from penstock_client.errors import ApiError, ApiUnreachableError, NotThePlatformError, PlatformUnavailableError

log = logging.getLogger(__name__)
# Nothing is printed unless the program that uses this library configures logging.
logging.getLogger("penstock_client").addHandler(logging.NullHandler())

CONNECT_S = 10.0
ANSWER_S = 30.0
"""How long a whole answer may take."""
SILENCE_S = 60.0
"""The longest pause inside a file."""
MOST_BYTES = 256 * 2**20
"""Of an answer, unpacked."""
MOST_LINE = 4 * 2**20
IDEMPOTENT = ("GET", "HEAD")
RETRY_AFTER_S = (0.2, 0.6)
"""The wait before each retry."""
RETRIED_S = 3.0
"""A request that has failed slowly is not retried: whatever answers has waited already."""
RETRIED = (502, 503, 504)
USER_AGENT = "penstock-client"


class Transport:
    """Requests to the API at `url`. Threads may share it."""

    def __init__(
        self,
        url: str,
        token: str | None,
        headers: Mapping[str, str],
        verify: ssl.SSLContext | bool,
    ) -> None:
        self.url = checked_address(url)
        sent = {"user-agent": USER_AGENT, "accept": "application/json", **checked_headers(headers)}
        if token is not None:
            sent["authorization"] = f"Bearer {checked_token(token, 'token')}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=sent,
            verify=verify,
            follow_redirects=False,
            # A proxy that the environment names must not see what is meant for this machine.
            trust_env=not is_loopback(self.url),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """The JSON that the API answers. Raises ApiError.

        GET is retried, as RETRY_AFTER_S says, if the connection fails or a gateway has no answer.
        """
        left = list(RETRY_AFTER_S) if method in IDEMPOTENT else []
        retried_until = time.monotonic() + RETRIED_S
        while True:
            try:
                return self._once(method, path, body, params, headers, timeout_s)
            except _LateError:
                raise ApiUnreachableError(f"--api: {self.url} does not answer within {timeout_s:g} s") from None
            except ApiError as error:
                passing = isinstance(error, ApiUnreachableError) or error.status in RETRIED
                if not left or not passing or time.monotonic() > retried_until:
                    raise
                wait = left.pop(0)
                log.warning("%s %s: %s; retry in %g s", method, path, error, wait)
                time.sleep(wait)

    def lines(
        self, path: str, params: Mapping[str, Any] | None, headers: Mapping[str, str], silence_s: float
    ) -> Iterator[str]:
        """The lines of a `text/event-stream`; ends when the server ends it. At most `silence_s` seconds without one.

        An answer of another kind is an error. Raises ApiError.
        """
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
        sent = {"accept": "text/event-stream", **headers}
        try:
            with self._http.stream("GET", path, params=_given(params), headers=sent, timeout=timeout) as answer:
                kind = answer.headers.get("content-type", "").partition(";")[0]
                if answer.status_code != 200 or kind != "text/event-stream":
                    body = self._body(answer, time.monotonic() + ANSWER_S)
                    read_answer(self.url, path, answer.status_code, answer.headers, body)
                    raise NotThePlatformError(f"--api: {self.url}{path} answers {kind}, expected text/event-stream")
                yield from _bounded_lines(answer)
        except (httpx.HTTPError, _LateError) as error:
            raise ApiUnreachableError(self._unreachable(error)) from None

    def parts(self, path: str) -> Iterator[bytes]:
        """The body of a file, part by part, however large; at most SILENCE_S seconds without one. Raises ApiError."""
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        try:
            with self._http.stream("GET", path, timeout=timeout, headers={"accept": "*/*"}) as answer:
                if answer.status_code != 200 or "html" in answer.headers.get("content-type", ""):
                    body = self._body(answer, time.monotonic() + ANSWER_S)
                    read_answer(self.url, path, answer.status_code, answer.headers, body)
                    raise NotThePlatformError(f"--api: {self.url}{path} answers {answer.status_code}, expected a file")
                yield from answer.iter_bytes()
        except (httpx.HTTPError, _LateError) as error:
            raise ApiUnreachableError(self._unreachable(error)) from None

    def _once(
        self,
        method: str,
        path: str,
        body: Any,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> Any:
        ends = time.monotonic() + timeout_s
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        try:
            with self._http.stream(
                method, path, json=body, params=_given(params), headers=headers, timeout=timeout
            ) as answer:
                content = self._body(answer, ends)
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise _LateError from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ApiUnreachableError(self._unreachable(error)) from None
        return read_answer(self.url, path, answer.status_code, answer.headers, content)

    def _body(self, answer: httpx.Response, ends: float) -> bytes:
        """The body: each part has a deadline of its own in httpx, so a server that sends slowly needs this one."""
        found = bytearray()
        for part in answer.iter_bytes():
            found += part
            if len(found) > MOST_BYTES:
                raise NotThePlatformError(f"--api: {self.url} answers more than {MOST_BYTES // 2**20} MiB")
            if time.monotonic() > ends:
                raise _LateError
        return bytes(found)

    def _unreachable(self, error: Exception) -> str:
        causes = _causes(error)
        if certificate := next((cause for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)), None):
            why = certificate.verify_message or certificate.reason
            return f"--api: {self.url} has a certificate that is not trusted ({why}): --ca names its authority"
        if any(isinstance(cause, ssl.SSLError) for cause in causes):
            return f"--api: {self.url} cannot be reached over TLS ({error}): expected a server that speaks https"
        hint = "; `penstock up` starts an API on this machine" if is_loopback(self.url) else ""
        return f"--api: {self.url} cannot be reached ({str(error) or type(error).__name__}){hint}"


class _LateError(Exception):
    """The answer, or its end, does not come in time."""


def is_passing(error: ApiError) -> bool:
    """Whether the same request may succeed soon: no answer, or a gateway's without what it needs."""
    return isinstance(error, ApiUnreachableError | PlatformUnavailableError) or error.status in RETRIED


def _given(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {name: value for name, value in params.items() if value is not None} if params else None


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def _bounded_lines(answer: httpx.Response) -> Iterator[str]:
    """Complete lines; httpx would collect one without an end for ever."""
    waiting = ""
    for part in answer.iter_text():
        *complete, waiting = (waiting + part).split("\n")
        yield from (line.removesuffix("\r") for line in complete)
        if len(waiting) > MOST_LINE:
            raise NotThePlatformError(f"a line of the stream has more than {MOST_LINE // 2**20} MiB")
