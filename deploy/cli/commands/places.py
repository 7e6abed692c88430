"""Owns `penstock places`: it lists the places that a run avoids, and makes the run try one again.

Must not ask the API, nor decide what is avoided.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import OwnJsonOption, RunArgument
from penstock_client.cli.reporting import fail
from penstock_client.cli.terminal import print_json, print_note, print_table

if TYPE_CHECKING:
    from services.streams.runs.places import AvoidedPlace

SETTING = "PENSTOCK_REDIS"


def places(
    run: RunArgument,
    retry: Annotated[
        str, typer.Option("--retry", metavar="PLACE", help="Avoid this place no longer; its name as listed.")
    ] = "",
    redis: Annotated[str, typer.Option("--redis", envvar=SETTING, help="Redis of the platform.")] = "",
    as_json: OwnJsonOption = False,
) -> None:
    """List the places that a run avoids: nodes, and GPUs of nodes; --retry makes it try one again, after a repair.

    Needs no API: on a cluster it runs in a pod of the platform. The replica that holds the place starts then.
    """
    from services.streams.connection.client import RedisUnavailableError

    if not redis:
        fail(f"--redis: '' is not valid: expected the address of Redis, also as {SETTING}")
    try:
        found = asyncio.run(_left(redis, run, retry))
    except RedisUnavailableError as error:
        fail(str(error))
    if as_json:
        print_json([{"name": place.name, **place.model_dump()} for place in found])
        return
    if not found:
        print_note(f"run {run} avoids no place")
    rows = [
        (place.name, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(place.until)), str(place.count), place.reason)
        for place in found
    ]
    print_table(("place", "until", "failed", "reason"), rows, right=("failed",))


async def _left(url: str, run: str, retry: str) -> list[AvoidedPlace]:
    """The places that the run avoids, after `retry` is forgotten; `fail` for an unknown run or place."""
    from services.streams.connection.client import connect
    from services.streams.keys import RunKeys
    from services.streams.runs.places import avoided_places, forget_place
    from services.streams.state.runs import RunRecords, unknown

    redis = await connect(url)
    try:
        if not await RunRecords(redis).exists(run):
            fail(str(unknown(run)))
        found = await avoided_places(redis, RunKeys(run))
        if not retry:
            return found
        if not await forget_place(redis, RunKeys(run), retry):
            names = ", ".join(repr(place.name) for place in found) or "none: the run avoids no place"
            fail(f"--retry: {retry!r} is not valid: expected one of {names}")
        return [place for place in found if place.name != retry]
    finally:
        await redis.aclose()
