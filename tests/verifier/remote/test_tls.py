"""Requests go to an address that was checked, and the certificate must still be of the host's name."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from services.settings.rewards.kinds import HttpReward
from tests.harness.programs import needed
from tests.system.certificates import make_certificates
from tests.verifier.remote.fake_service import judging, serving
from verifier.remote.http_judge import HttpJudge
from verifier.verifiers.base import Candidate, Judgement, UndecidedError


async def judged(folder: Path, names: str, monkeypatch: pytest.MonkeyPatch) -> Judgement | UndecidedError:
    """By a service on localhost whose certificate is of these names, from an authority of SSL_CERT_FILE."""
    needed("openssl")
    monkeypatch.setenv("SSL_CERT_FILE", str(make_certificates(folder, names)))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    async with serving(judging(lambda _: {"correct": True}), context) as service:
        judge = HttpJudge(HttpReward(url=f"https://localhost:{service.port}/score", attempts=1))
        [decision] = await judge.judge_all([Candidate("4", {"answer": "4"})])
        await judge.aclose()
    return decision


async def test_a_certificate_of_the_name_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await judged(tmp_path, "DNS:localhost", monkeypatch) == Judgement(correct=True, score=1.0)


@pytest.mark.parametrize("names", ["DNS:other.example", "IP:127.0.0.1"])
async def test_a_certificate_of_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    decision = await judged(tmp_path, names, monkeypatch)
    assert "certificate verify failed: Hostname mismatch" in str(decision)
