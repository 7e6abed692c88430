"""Owns what pods report before they end because their node cannot do their work: it explains why replicas are missing.

Must not keep a problem for long: the pod that replaces the one that reported it reports it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.contracts.base import Value
from services.streams.connection.client import Redis, RedisUnavailableError, connect
from services.streams.keys import NODE_PROBLEMS

log = logging.getLogger(__name__)

REPORT_S = 5.0
SHOWN_S = 600.0
"""How long a problem is shown after it was reported last."""


class NodeProblem(Value):
    """Why a node cannot host a role, in one line; `at`: Unix seconds."""

    role: str
    node: str
    text: str
    at: float

    def __str__(self) -> str:
        return f"{self.role}: node {self.node}: {self.text}"


async def report_node(url: str, role: str, node: str, text: str) -> None:
    """Report a problem, in place of the previous one of this role and node. Without Redis it is only in the log."""
    problem = NodeProblem(role=role, node=node, text=text, at=time.time())
    try:
        async with asyncio.timeout(REPORT_S):
            redis = await connect(url, REPORT_S)
            try:
                await redis.hset(NODE_PROBLEMS, f"{role} {node}", problem.model_dump_json())
                await redis.expire(NODE_PROBLEMS, math.ceil(SHOWN_S))  # of all: the last report is the newest
            finally:
                await redis.aclose()
    except (RedisError, RedisUnavailableError, TimeoutError, OSError) as error:
        log.warning("the problem of this node could not be reported to runs: %s", str(error) or type(error).__name__)


async def node_problems(redis: Redis, roles: Collection[str]) -> list[NodeProblem]:
    """What pods of these roles reported within SHOWN_S, by role and node. Nothing is deleted here: Redis does."""
    found: list[NodeProblem] = []
    for field, value in sorted((await redis.hgetall(NODE_PROBLEMS)).items()):
        try:
            problem = NodeProblem.model_validate_json(value)
        except ValidationError as error:
            log.warning("node problem %r cannot be parsed and is left out: %s", field, error.errors()[0]["msg"])
            continue
        if time.time() - problem.at <= SHOWN_S and problem.role in roles:
            found.append(problem)
    return found
