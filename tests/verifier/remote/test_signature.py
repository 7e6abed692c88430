"""The signature of a request: by this secret, of this body, at this time."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from pydantic import SecretStr

from verifier.remote.signature import RequestSignatureError, check_signature, signature

SECRET, BODY, NOW = SecretStr("s3cret"), b'{"a": 1}', 1_700_000_000.9


def test_a_signature_is_what_the_docs_say() -> None:
    expected = hmac.new(b"s3cret", b"1700000000." + BODY, hashlib.sha256).hexdigest()
    assert signature(SECRET, BODY, NOW) == f"t=1700000000,v1={expected}"


@pytest.mark.parametrize("off", [-299, 0, 299])
def test_a_signature_holds_for_five_minutes(off: int) -> None:
    check_signature(SECRET, BODY, signature(SECRET, BODY, NOW), int(NOW) + off)


@pytest.mark.parametrize("off", [-302, 302, 86400])
def test_an_old_signature_is_refused(off: int) -> None:
    with pytest.raises(RequestSignatureError, match="more than 300 s off"):
        check_signature(SECRET, BODY, signature(SECRET, BODY, NOW), NOW + off)


def test_a_changed_time_is_refused() -> None:
    header = signature(SECRET, BODY, NOW).replace("t=1700000000", "t=1700000001")
    with pytest.raises(RequestSignatureError, match="wrong"):
        check_signature(SECRET, BODY, header, NOW)


def test_another_body_or_secret_is_refused() -> None:
    header = signature(SECRET, BODY, NOW)
    for secret, body in ((SECRET, BODY + b" "), (SecretStr("other"), BODY)):
        with pytest.raises(RequestSignatureError, match="wrong"):
            check_signature(secret, body, header, NOW)


@pytest.mark.parametrize(
    "header", ["", "v1=00", "t=1,v1=zz", "t=" + "1" * 99 + ",v1=" + "0" * 64, "t=\u0661,v1=" + "0" * 64]
)
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(RequestSignatureError, match="missing or malformed"):
        check_signature(SECRET, BODY, header, NOW)
