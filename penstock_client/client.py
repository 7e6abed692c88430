"""Owns the client of the REST API: its connection, and all calls together.

Must not print.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from penstock_client.access import checked_address, find_token
from penstock_client.calls.changing import RunChanging
from penstock_client.calls.files import RunFiles
from penstock_client.calls.platform import PlatformReading
from penstock_client.calls.reading import RunReading
from penstock_client.calls.samples import SampleReading
from penstock_client.transport import Transport


class Client(RunReading, SampleReading, RunChanging, RunFiles, PlatformReading):
    """The REST API at `url`; threads may share it. Close it, or use it as a context manager.

    `token`: default as `penstock_client.access.find_token`; it is sent to this server alone. `headers`: sent with every
    request, such as those of a proxy. `verify`: an SSL context, or whether the server's certificate is checked at all.
    Every method raises ApiError, whose text is for the user, and answers within the time limits of the transport.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        address = checked_address(url)
        super().__init__(Transport(address, find_token(address, token), headers or {}, verify))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
