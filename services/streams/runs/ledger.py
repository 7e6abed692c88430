"""Owns the ledger of a run and of a project: response tokens by use, and what was charged for processes.

Must not decide what is charged; the controller does. docs/operations/costs.md describes what counts as what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.contracts import Closing, Fence, Lane
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.connection.reading import read_together
from services.streams.keys import PROJECTS, RunKeys, project_ledger
from services.streams.state.ownership import RoleOwner
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER

GENERATED, IN_FLIGHT = "generated", "in_flight"
ENDED_USES = ("trained", "filtered", "stale", "dead", "evaluated", "discarded")
TOKEN_USES = (*ENDED_USES, IN_FLIGHT)
"""The uses of tokens. Each generated token has one of them at any time."""
BUSY, IDLE = "busy", "idle"
GPU_MS, CPU_MS, COST = "gpu_ms", "cpu_ms", "cost"
"""What is charged: milliseconds of a GPU, of a CPU, and billionths of a currency."""
TOKENS = "tokens"


def charged_field(service: str, condition: str, what: str, currency: str = "") -> str:
    """The field of a ledger that holds what the processes of a service were charged while BUSY or IDLE."""
    return ".".join(part for part in (service, condition, what, currency) if part)


@dataclass(frozen=True)
class Ledger:
    """`tokens`: by use, and those generated. `charged`: by field. `since`: Unix seconds of the first account, or None.

    `at`: of the last account; None before the first.
    """

    tokens: Mapping[str, int]
    charged: Mapping[str, int]
    since: float | None = None
    at: float | None = None

    @property
    def closes(self) -> bool:
        """Whether each generated token has exactly one use."""
        uses = [self.tokens[use] for use in TOKEN_USES]
        return self.tokens[GENERATED] == sum(uses) and min(uses) >= 0

    def total(self, what: str, currency: str = "") -> int:
        """The sum of what was charged: GPU_MS, CPU_MS, or the COST in a currency."""
        end = f".{what}.{currency}" if currency else f".{what}"
        return sum(amount for field, amount in self.charged.items() if field.endswith(end))

    @property
    def currencies(self) -> list[str]:
        """The currencies in which anything was charged."""
        return sorted({field.rsplit(".", 1)[1] for field in self.charged if f".{COST}." in field})


async def read_ledger(redis: Redis, keys: RunKeys) -> Ledger:
    """The ledger of a run as it is now, of one moment; tokens in flight are counted by group, not derived.

    Tokens that were generated under a release without ledgers are in none of the numbers.
    """
    lanes = [keys.lane(lane) for lane in Lane]
    of_lanes = ((("hgetall", lane.counters), ("hvals", lane.tokens_in_flight)) for lane in lanes)
    stored, *counted = await read_together(redis, ("hgetall", keys.ledger), *chain.from_iterable(of_lanes))
    tokens = dict.fromkeys((GENERATED, *TOKEN_USES), 0)
    for counters in counted[::2]:
        for use in (GENERATED, *ENDED_USES):
            tokens[use] += int(counters.get(f"tokens_{use}".encode(), 0))
    tokens[IN_FLIGHT] = sum(int(value) for values in counted[1::2] for value in values)
    fields = {name.decode(): value for name, value in stored.items()}
    return Ledger(tokens, _charged(fields), _time(fields.get("since")), _time(fields.get("at")))


async def read_project_ledger(redis: Redis, project: str) -> Ledger:
    """What all runs of a project used together, deleted ones included, as of their last accounts."""
    stored = {name.decode(): value for name, value in (await redis.hgetall(project_ledger(project))).items()}
    tokens = {use: int(stored.get(f"{TOKENS}.{use}", 0)) for use in (GENERATED, *TOKEN_USES)}
    return Ledger(tokens, _charged(stored))


async def ledger_projects(redis: Redis) -> list[str]:
    """The projects that have a ledger."""
    return sorted(name.decode() for name in await redis.smembers(PROJECTS))


def _charged(fields: Mapping[str, Any]) -> dict[str, int]:
    """The fields of what was charged, such as `rollout.busy.gpu_ms`."""
    return {
        name: int(value)
        for name, value in fields.items()
        if name.count(".") >= 2 and name.split(".")[2] in (GPU_MS, CPU_MS, COST)
    }


def _time(value: bytes | None) -> float | None:
    try:
        found = float(value) if value else math.nan
    except ValueError:
        return None
    return found if math.isfinite(found) else None


class LedgerWriter(RoleOwner):
    """Charges one run, as the owner of the controller's role."""

    def __init__(self, redis: Redis, keys: RunKeys, fence: Fence, project: str) -> None:
        super().__init__(redis, keys, OWNER, fence)
        self._project = project

    async def charge(self, at: float, amounts: Mapping[str, int], *, discard: bool = False) -> None:
        """Add amounts by field to the run and its project, and bring the project's tokens in line with the run's.

        `at`: Unix seconds; an account of the same time is the same account. `discard`: the tokens of groups in flight
        are discarded, because no group will be trained any more. Raises FencedError.
        """
        await self._call(
            "charge_run",
            ledger_key=self._keys.ledger,
            project_key=project_ledger(self._project),
            projects_key=PROJECTS,
            counters_keys=_counters_keys(self._keys),
            in_flight_keys=_in_flight_keys(self._keys),
            project=self._project,
            at=repr(at),
            discard=int(discard),
            amount_list=[part for field, amount in amounts.items() if amount for part in (field, amount)],
        )


async def close_ledger(redis: Redis, record: RunRecord, closing: Closing) -> None:
    """Discard the tokens in flight of a run that is being closed, before anything of it is deleted. May be repeated."""
    keys = RunKeys(record.id)
    await call(
        redis,
        "close_ledger",
        record_key=keys.record,
        ledger_key=keys.ledger,
        project_key=project_ledger(record.project),
        counters_keys=_counters_keys(keys),
        in_flight_keys=_in_flight_keys(keys),
        closing=closing.value,
    )


def _counters_keys(keys: RunKeys) -> list[str]:
    return [keys.lane(lane).counters for lane in Lane]


def _in_flight_keys(keys: RunKeys) -> list[str]:
    return [keys.lane(lane).tokens_in_flight for lane in Lane]
