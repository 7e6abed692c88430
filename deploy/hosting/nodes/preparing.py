"""Owns the work that a run needs once before it is placed, in a process on a node for preparation.

Must not place services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from deploy.hosting.environment import place, process_environment
from services.settings import Recipe
from services.streams.state.run_record import RunRecord

PREPARE_S, ENDING_S = 600.0, 15.0
"""The least time that preparation gets, and what of it is left to report that a download ran out of it."""


def prepare(document: dict[str, Any], cache: str, deadline_s: float) -> str:
    """Runs in a worker process: the model library is large, and the gateway must stay small."""
    from learner.model.source import record_name
    from services.settings import ModelSettings

    return record_name(ModelSettings.model_validate(document), Path(cache), deadline_s)


def check_fit(
    document: dict[str, Any], name: str, gib: dict[str, float | None], replicas: int | None, cache: str, _: float
) -> None:
    """Runs in a worker process, like `prepare`.

    `gib`: the memory of one GPU by role, in GiB. `replicas`: those of rollout, if this is the only machine.
    """
    from learner.model.fit import check_fit, check_machine
    from learner.model.memory import host_size
    from learner.model.shape import recorded_shape

    recipe = Recipe.model_validate(document)
    if shape := recorded_shape(recipe.model, name, Path(cache)):
        check_fit(recipe, shape, gib["learner"], gib["rollout"])
        if replicas is not None:
            check_machine(recipe, shape, replicas, host_size())


async def on_a_node(record: RunRecord, do: Callable[..., Any], *arguments: Any) -> Any:
    """What `do` returns on a node for preparation; its last argument is the time that a download may take.

    Raises what `do` raises, TimeoutError.
    """
    deadline_s = max(PREPARE_S, record.recipe.limits.startup_timeout_s)
    environment = process_environment(record.recipe.learner.threads)
    task = ray.remote(do).options(
        num_cpus=0, resources=place("cpu"), max_retries=0, runtime_env={"env_vars": environment}
    )
    reference = task.remote(*arguments, deadline_s - ENDING_S)
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(reference.future())
    except RayTaskError as error:
        raise error.cause from None
    except TimeoutError:
        ray.cancel(reference, force=True)  # it would go on, and keep the folder locked
        message = (
            f"preparation has not ended within {deadline_s:g} s (limits.startup_timeout_s, at least {PREPARE_S:g})"
        )
        raise TimeoutError(message) from None
