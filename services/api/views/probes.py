"""Owns the responses to probes and to Prometheus.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel


class TargetGroup(BaseModel):
    """One entry of Prometheus HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Health(BaseModel):
    """A probe's response."""

    status: str
