"""Owns `penstock recover`: it lists the runs whose files are here and whose record Redis has lost, and adopts them.

Must not resume a run, nor ask the API: where that runs, the files of runs need not be.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.common import DEFAULT_RUNS, RunsOption
from penstock_client.cli.commands.arguments import OwnJsonOption
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import plain, print_json, print_line, print_note

if TYPE_CHECKING:
    from services.streams.connection.client import Redis

LINE = "{:<40}  {:>7}  {:<20}  {}"
SETTING = "PENSTOCK_REDIS"


def recover(
    names: Annotated[list[str] | None, typer.Option("--run", help="Only this run; may be repeated.")] = None,
    redis: Annotated[str, typer.Option("--redis", envvar=SETTING, help="Redis of the platform.")] = "",
    adopt: Annotated[bool, typer.Option("--adopt", help="Take them over; each is failed then.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    as_json: OwnJsonOption = False,
) -> None:
    """List the runs whose files are here or in PENSTOCK_STORE and whose record Redis has lost; --adopt takes them over.

    Needs no API: on a cluster it runs in a pod that has the files of runs. No process of such a run may be left.
    Exit status 1 if a run could not be read or adopted, 2 for any other error.
    """
    from services.storage.errors import StoreError
    from services.streams.connection.client import RedisUnavailableError

    if not redis:
        fail(f"--redis: '' is not valid: expected the address of Redis, also as {SETTING}")
    os.environ.setdefault("PENSTOCK_RUNS", str(runs.absolute()))
    try:
        rows = asyncio.run(_recovered(redis, names or [], adopt))
    except (RedisUnavailableError, StoreError, OSError) as error:
        fail(str(error))
    if as_json:
        print_json(rows)
    else:
        _print(rows, adopt)
    raise typer.Exit(EXIT_FAILED if any("error" in row for row in rows) else 0)


def _print(rows: list[dict[str, object]], adopted: bool) -> None:
    if not rows:
        print_note("no run is lost: Redis has the records of all runs whose files are here")
        return
    print_line(LINE.format("run", "step", "project", "resume it" if adopted else "state"))
    for row in rows:
        done = f"penstock resume {row['run']}" if adopted else "can be adopted"
        print_line(
            plain(LINE.format(row["run"], row.get("step", "-"), row.get("project") or "-", row.get("error", done)))
        )


async def _recovered(url: str, names: list[str], adopt: bool) -> list[dict[str, object]]:
    from services.streams.connection.client import connect
    from services.streams.runs.adopting.left import is_lost, names_here

    redis = await connect(url)
    try:
        found = names or [name for name in await asyncio.to_thread(names_here) if await is_lost(redis, name)]
        return [await _one(redis, name, adopt) for name in found]
    finally:
        await redis.aclose()


async def _one(redis: Redis, name: str, adopt: bool) -> dict[str, object]:
    from services.storage.errors import StoreError
    from services.streams.connection.functions import RedisFullError
    from services.streams.runs.adopting.adoption import adopt_run
    from services.streams.runs.adopting.left import is_lost, read_left
    from services.streams.runs.remains import RemainsError
    from services.streams.state.run_record import DEFAULT_PROJECT
    from services.streams.state.runs import RunStateError

    try:
        left = await asyncio.to_thread(read_left, name)
        if not await is_lost(redis, name):
            return {"run": name, "error": "Redis has its record: expected a run that Redis has lost"}
        project = left.remains.facts.project or DEFAULT_PROJECT
        if adopt:
            await adopt_run(redis, name, left.remains, files=left.files, place=left.place, project=project)
    except (RemainsError, RunStateError, StoreError, RedisFullError, ValueError) as error:
        return {"run": name, "error": str(error)}
    return {"run": name, "step": left.remains.step, "project": project}
