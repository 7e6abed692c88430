"""Owns the secrets of rewards and the signature of a request: `X-Penstock-Signature: t=UNIX_SECONDS,v1=HEX`.

Must not show a secret: in no text, no log, no repr.

HEX is the HMAC-SHA-256, with the shared secret as its key, of the bytes `UNIX_SECONDS`, `.` and the request's body. A
service computes it again, compares in constant time, and refuses a time that is more than 5 minutes off.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

from pydantic import SecretStr

from verifier.remote.faults import RemoteSetupError

SIGNATURE_HEADER = "X-Penstock-Signature"
REQUEST_HEADER = "X-Penstock-Request"
"""The same for all attempts to send one request."""
TOLERANCE_S = 300
HEADER = re.compile(r"t=(?P<time>[0-9]{1,12}),v1=(?P<digest>[0-9a-f]{64})", re.ASCII)


class RequestSignatureError(Exception):
    """A request is not signed with the shared secret, or too long ago. The text says which."""


def secret_from(environ: Mapping[str, str], field: str, name: str) -> SecretStr:
    """The secret in the variable `name`, which the setting `field` names. Raises RemoteSetupError.

    It is of printable ASCII characters, because it may travel in a header.
    """
    value = environ.get(name, "").strip()
    if not value:
        state = "empty" if name in environ else "not set"
        raise RemoteSetupError(
            f"{field}: the variable {name} is {state}: expected a secret in the verifier's environment"
        )
    if not (value.isascii() and value.isprintable()):
        raise RemoteSetupError(f"{field}: the variable {name} is not valid: expected printable ASCII characters")
    return SecretStr(value)


def signature(secret: SecretStr, body: bytes, unix_seconds: float) -> str:
    """The header's value for a body that is sent at `unix_seconds`."""
    time = str(int(unix_seconds))
    return f"t={time},v1={_digest(secret, time, body)}"


def check_signature(secret: SecretStr, body: bytes, header: str, unix_seconds: float) -> None:
    """Raises RequestSignatureError unless `header` is of this body, secret and time, give or take 5 minutes."""
    found = HEADER.fullmatch(header)
    if not found:
        raise RequestSignatureError(f"{SIGNATURE_HEADER}: missing or malformed: expected t=UNIX_SECONDS,v1=HEX")
    if not hmac.compare_digest(found["digest"], _digest(secret, found["time"], body)):
        raise RequestSignatureError(f"{SIGNATURE_HEADER}: wrong: expected the HMAC-SHA-256 of the time and the body")
    if abs(unix_seconds - int(found["time"])) > TOLERANCE_S:
        raise RequestSignatureError(f"{SIGNATURE_HEADER}: its time is more than {TOLERANCE_S} s off")


def _digest(secret: SecretStr, time: str, body: bytes) -> str:
    return hmac.new(secret.get_secret_value().encode(), time.encode() + b"." + body, hashlib.sha256).hexdigest()
