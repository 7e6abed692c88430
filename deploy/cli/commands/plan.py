"""Owns `penstock plan`: it prints what a recipe needs.

Must not compute; deploy.cli.planning and learner.model do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.common import DEFAULT_RUNS, RunsOption, reported_errors
from penstock_client.cli.commands.arguments import OwnJsonOption, RecipeArgument
from penstock_client.cli.terminal import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.cli.planning import Throughput
    from learner.model.shape import ModelShape
    from services.settings import Recipe


def plan(
    recipe: RecipeArgument,
    generation: Annotated[float, typer.Option(min=1e-9, help="Tokens/s that one rollout replica generates.")] = 2500.0,
    learning: Annotated[float, typer.Option(min=1e-9, help="Tokens/s that one learner rank trains.")] = 400.0,
    link: Annotated[float, typer.Option(min=1e-9, help="GB/s of the weight broadcast.")] = 25.0,
    survival: Annotated[
        float, typer.Option(min=1e-9, max=1, help="Share of groups that dynamic sampling keeps.")
    ] = 0.5,
    response_tokens: Annotated[
        float | None,
        typer.Option(min=1, help="Mean response length in tokens; default: half of rollout.max_new_tokens."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Cost of one GPU-hour, in any currency.")] = None,
    gpu_gib: Annotated[float, typer.Option(min=1e-9, help="Memory of one device, in GiB.")] = 80.0,
    runs: RunsOption = DEFAULT_RUNS,
    as_json: OwnJsonOption = False,
) -> None:
    """Compute what a recipe needs: memory per rank, per replica and in Redis, bytes per weight sync, time per step.

    Give the throughputs that you measured. The defaults are assumptions for a 32B model on 80 GB GPUs, not
    measurements; the table's title shows the throughputs used.
    """
    from deploy.cli.planning import Throughput, plan_figures
    from deploy.cli.recipe_files import load_own
    from learner.model.shape import model_shape

    with reported_errors():
        loaded = load_own(recipe)
        shape = model_shape(loaded.model, runs / "models")
    tokens = response_tokens or loaded.rollout.max_new_tokens / 2
    stated = Throughput(generation, learning, link * 1e9, survival, tokens)
    if as_json:
        print_json(plan_figures(loaded, shape, stated, price))
        return
    out = console()
    out.print(f"{loaded.name}: {shape.name}, {shape.parameters / 1e9:.3f} billion parameters, {shape.layers} layers")
    out.print(_learner(loaded, shape, gpu_gib))
    out.print(_checkpoints(loaded, shape))
    out.print(_replica(loaded, shape, gpu_gib))
    out.print(_redis(loaded))
    out.print(_step(loaded, shape, stated))
    out.print(_cost(loaded, shape, stated, price))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _learner(recipe: Recipe, shape: ModelShape, gpu_gib: float) -> Table:
    from rich.table import Table

    from learner.model.memory import PROCESS, learner_memory

    title = f"One learner rank of {recipe.learner.ranks}, {recipe.learner.dtype}, by ZeRO stage, in GiB"
    table = Table(title=title, caption=f"In addition, the process itself: {_gib(PROCESS)} on the host")
    parts = ("parameters", "gradients", "optimizer", "reference", "buffers", "activations")
    for title in ("stage", *parts, "sum", "loading", "host", "fits"):
        table.add_column(title, justify="right")
    for stage in range(4):
        need = learner_memory(recipe, shape, stage)
        sizes = (*(getattr(need, part) for part in parts), need.total, need.loading, need.host_peak)
        mark = " (recipe)" if stage == recipe.learner.zero_stage else ""
        fits = "yes" if need.peak <= gpu_gib * 2**30 else "no"
        table.add_row(f"{stage}{mark}", *(f"{size / 2**30:.2f}" for size in sizes), fits)
    return table


def _checkpoints(recipe: Recipe, shape: ModelShape) -> Table:
    from deploy.cli.planning import checkpoint_bytes

    size, learner = checkpoint_bytes(recipe, shape), recipe.learner
    every = f"every {learner.checkpoint_every} rollout steps" if learner.checkpoint_every else "disabled"
    most = "largest size on disk: learner.checkpoints_kept, and the one being written"
    rows = [
        ("size on disk of each", _gib(size)),
        (most, _gib(size * (learner.checkpoints_kept + 1))),
        ("host memory per rank while a checkpoint is written", _gib(size / learner.ranks)),
    ]
    return _pairs(f"Checkpoints, {every}", rows)


def _replica(recipe: Recipe, shape: ModelShape, gpu_gib: float) -> Table:
    from learner.model.fit import replica_memory

    need, rollout = replica_memory(recipe, shape), recipe.rollout
    cache = rollout.kv_cache_mib * 2**20
    total = need.weights + need.staged + cache
    fits = f"{'fits' if total <= gpu_gib * 2**30 else 'does not fit'} {gpu_gib:g} GiB"
    rows = [
        ("weights per device", _gib(need.weights)),
        ("staged weights per device during a sync", _gib(need.staged)),
        ("KV cache per device (rollout.kv_cache_mib)", _gib(cache)),
        ("sum per device", f"{_gib(total)} ({fits})"),
        ("KV cache per token", f"{need.kv_per_token:,.0f} bytes"),
        ("tokens that fit in the cache", f"{need.kv_tokens:,.0f}"),
        ("sequences of model.max_model_len that fit", f"{need.longest_sequences:.1f}"),
    ]
    devices = f"{rollout.tensor_parallel} device{'s' if rollout.tensor_parallel > 1 else ''}"
    return _pairs(f"One rollout replica of {rollout.replicas}, {devices}, {rollout.dtype}", rows)


def _redis(recipe: Recipe) -> Table:
    from services.streams.memory_bound import footprint

    need = footprint(recipe.at_most)
    rows = [(name, f"{size / 2**20:,.1f} MiB") for name, size in need.parts.items()]
    rows += [(f"plus, for each {prompt}", f"{size:,} bytes") for prompt, size in need.unsized.items()]
    return _pairs("Redis, at most", [*rows, ("sum, with Redis' own overhead", f"{need.total / 2**20:,.0f} MiB")])


def _step(recipe: Recipe, shape: ModelShape, stated: Throughput) -> Table:
    from deploy.cli.planning import rank_balance, step_time
    from learner.model.fit import sync_bytes

    time, steps = step_time(recipe, shape, stated), recipe.limits.rollout_steps
    overlap = "overlapped" if recipe.limits.max_staleness > 0 else "one after the other"
    rows = [
        ("mean response", f"{stated.response_tokens:,.0f} tokens"),
        ("generated tokens", f"{time.sampled_tokens:,.0f} ({stated.survival:.0%} of groups kept)"),
        ("trained tokens", f"{time.trained_tokens:,.0f}"),
        ("bytes per weight sync, to every worker", f"{sync_bytes(recipe, shape) / 1e9:.2f} GB"),
        ("generating", f"{time.generating:,.1f} s"),
        ("learning", f"{time.learning:,.1f} s"),
        ("mean work of a learner rank / the largest", f"{rank_balance(recipe, stated.response_tokens):.2f}"),
        ("weight sync", f"{time.syncing:,.1f} s"),
        (f"rollout step ({overlap})", f"{time.total:,.1f} s"),
        (f"{steps} rollout steps", f"{time.total * steps / 3600:,.1f} h"),
    ]
    link = f"{stated.link / 1e9:g} GB/s"
    speeds = f"{stated.generation:g} tokens/s per replica, {stated.learning:g} per rank, {link}"
    return _pairs(f"One rollout step at {speeds}", rows)


def _cost(recipe: Recipe, shape: ModelShape, stated: Throughput, price: float | None) -> Table:
    from deploy.cli.planning import booked_gpus, step_time

    gpus = booked_gpus(recipe)
    hours = step_time(recipe, shape, stated).total * recipe.limits.rollout_steps / 3600
    rows = [("GPUs, reserved for the whole run", f"{gpus:g}"), ("GPU-hours of training", f"{gpus * hours:,.0f}")]
    if price is not None:
        rows.append((f"cost at {price:g} per GPU-hour", f"{gpus * hours * price:,.0f}"))
    return _pairs("Cost, without start-up and pauses", rows)


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table
