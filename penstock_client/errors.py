"""Owns the errors of the client. The text of each is for the user: one line per fault, and never a token.

Must not decide which answer is which error; penstock_client.answers does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ApiError(RuntimeError):
    """The API refused a request, cannot be reached, or is not Penstock's.

    `status`: of the answer, None without one. `title`, `errors` and `request_id`: of a problem document (RFC 9457).
    """

    def __init__(
        self,
        text: str,
        status: int | None = None,
        title: str = "",
        errors: Sequence[Mapping[str, Any]] = (),
        request_id: str = "",
    ) -> None:
        super().__init__(text)
        self.status = status
        self.title = title
        self.errors = tuple(errors)
        self.request_id = request_id


class ApiUnreachableError(ApiError):
    """No server answers at the address, or not in time."""


class NotThePlatformError(ApiError):
    """What answers is not Penstock's API: a proxy's login page, a redirect, another server or release."""


class TokenRefusedError(ApiError):
    """401: the API does not know who asks."""


class RoleMissingError(ApiError):
    """403: who asks lacks the role that the request needs."""


class PlatformUnavailableError(ApiError):
    """503: the API answers, but what it needs, such as Redis, does not."""


class AccessError(ApiError):
    """An address, a token, a header or a certificate that was given cannot be used; nothing was sent."""
