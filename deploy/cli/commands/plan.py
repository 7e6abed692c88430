"""Owns `penstock plan`: what a recipe needs, printed.

Must not compute; deploy.cli.planning does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.cli.planning import Throughput
    from learner.model.shape import ModelShape
    from services.settings import Recipe


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")],
    generation: Annotated[float, typer.Option(min=1e-9, help="Tokens/s that one rollout replica generates.")] = 2500.0,
    learning: Annotated[float, typer.Option(min=1e-9, help="Tokens/s that one learner rank trains.")] = 400.0,
    link: Annotated[float, typer.Option(min=1e-9, help="GB/s of the weight broadcast.")] = 25.0,
    survival: Annotated[float, typer.Option(min=1e-9, max=1, help="Share of groups that sampling keeps.")] = 0.5,
    response_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean response length; default: half of rollout.max_new_tokens.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="What one GPU costs an hour, in your currency.")] = None,
    gpu_gib: Annotated[float, typer.Option(min=1e-9, help="Memory of one device, in GiB.")] = 80.0,
    runs: Annotated[Path, typer.Option(envvar="PENSTOCK_RUNS", help="Folder for runs, models and data.")] = Path(
        "runs"
    ),
) -> None:
    """Compute what a recipe needs: memory per rank, per replica and in Redis, bytes per weight sync, time per step.

    State the throughputs that you measured. Their defaults are assumptions for a 32B model on 80 GB GPUs, nobody's
    measurements; the table's title says which figures the times follow from.
    """
    from deploy.cli.console import console
    from deploy.cli.main import obstacles
    from deploy.cli.planning import Throughput
    from learner.model.shape import model_shape
    from services.settings import load_recipe

    with obstacles():
        loaded = load_recipe(recipe)
        shape = model_shape(loaded.model, runs / "models")
    tokens = response_tokens or loaded.rollout.max_new_tokens / 2
    stated = Throughput(generation, learning, link * 1e9, survival, tokens)
    out = console()
    out.print(f"{loaded.name}: {shape.name}, {shape.parameters / 1e9:.3f} billion parameters, {shape.layers} layers")
    tables = (
        _learner(loaded, shape, gpu_gib), _checkpoints(loaded, shape), _fleet(loaded, shape, gpu_gib), _redis(loaded),
        _step(loaded, shape, stated), _cost(loaded, shape, stated, price),
    )  # fmt: skip
    for table in tables:
        out.print(table)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _learner(recipe: Recipe, shape: ModelShape, gpu_gib: float) -> Table:
    from rich.table import Table

    from deploy.cli.planning import learner_memory

    table = Table(title=f"One learner rank of {recipe.learner.ranks}, {recipe.learner.dtype}, by ZeRO stage")
    for title in ("stage", "parameters", "gradients", "optimizer", "reference", "activations", "sum", "fits"):
        table.add_column(title, justify="right")
    for stage in range(4):
        need = learner_memory(recipe, shape, stage)
        parts = (need.parameters, need.gradients, need.optimizer, need.reference, need.activations, need.total)
        mark = " (recipe)" if stage == recipe.learner.zero_stage else ""
        fits = "yes" if need.total <= gpu_gib * 2**30 else "no"
        table.add_row(f"{stage}{mark}", *(_gib(part) for part in parts), fits)
    return table


def _checkpoints(recipe: Recipe, shape: ModelShape) -> Table:
    from deploy.cli.planning import checkpoint_bytes

    size, learner = checkpoint_bytes(recipe, shape), recipe.learner
    every = f"every {learner.checkpoint_every} rollout steps" if learner.checkpoint_every else "none is written"
    return _pairs(f"Checkpoints, {every}", [
        ("one on disk", _gib(size)),
        ("on disk at most: those kept (learner.checkpoints_kept), and one being written",
         _gib(size * (learner.checkpoints_kept + 1))),
        ("host memory per rank while one is written", _gib(size / learner.ranks)),
    ])  # fmt: skip


def _fleet(recipe: Recipe, shape: ModelShape, gpu_gib: float) -> Table:
    from deploy.cli.planning import fleet

    need = fleet(recipe, shape)
    cache = recipe.rollout.kv_cache_mib * 2**20
    total = need.weights + need.staged + cache
    parallel = recipe.rollout.tensor_parallel
    return _pairs(f"One rollout replica of {recipe.rollout.replicas}, {parallel} devices, {recipe.rollout.dtype}", [
        ("weights per device", _gib(need.weights)),
        ("staged weights per device during a sync", _gib(need.staged)),
        ("KV cache per device (rollout.kv_cache_mib)", _gib(cache)),
        ("sum per device", f"{_gib(total)} ({'fits' if total <= gpu_gib * 2**30 else 'does not fit'} {gpu_gib:g} GiB)"),
        ("KV cache per token", f"{need.kv_per_token:,.0f} bytes"),
        ("tokens that the cache holds", f"{need.kv_tokens:,.0f}"),
        ("sequences of model.max_model_len that it holds", f"{need.longest_sequences:.1f}"),
    ])  # fmt: skip


def _redis(recipe: Recipe) -> Table:
    from services.memory_bound import footprint

    need = footprint(recipe)
    rows = [(name, f"{size / 2**20:,.1f} MiB") for name, size in need.parts.items()]
    if recipe.data.train is None:
        rows.append(("and for each training prompt of the file", f"{need.per_training_prompt:,} bytes"))
    if (recipe.data.path and recipe.data.held_out) or any(one.prompts is None for one in recipe.evaluation.sets):
        rows.append(("and for each prompt of a whole file evaluated", f"{need.per_held_out_prompt:,} bytes"))
    return _pairs("Redis, at most", [*rows, ("sum, with Redis' own share", f"{need.total / 2**20:,.0f} MiB")])


def _step(recipe: Recipe, shape: ModelShape, stated: Throughput) -> Table:
    from deploy.cli.planning import step_time, sync_bytes

    time = step_time(recipe, shape, stated)
    overlap = "overlapping" if recipe.limits.max_staleness > 0 else "in turns"
    assumed = f"{stated.generation:g} tokens/s a replica, {stated.learning:g} a rank, {stated.link / 1e9:g} GB/s"
    return _pairs(f"One rollout step at {assumed}", [
        ("mean response", f"{stated.response_tokens:,.0f} tokens"),
        ("generated tokens", f"{time.sampled_tokens:,.0f} ({stated.survival:.0%} of groups kept)"),
        ("trained tokens", f"{time.trained_tokens:,.0f}"),
        ("bytes per weight sync, to every worker", f"{sync_bytes(recipe, shape) / 1e9:.2f} GB"),
        ("generating", f"{time.generating:,.1f} s"),
        ("learning", f"{time.learning:,.1f} s"),
        ("weight sync", f"{time.syncing:,.1f} s"),
        (f"rollout step ({overlap})", f"{time.total:,.1f} s"),
        (f"{recipe.limits.rollout_steps} rollout steps", f"{time.total * recipe.limits.rollout_steps / 3600:,.1f} h"),
    ])  # fmt: skip


def _cost(recipe: Recipe, shape: ModelShape, stated: Throughput, price: float | None) -> Table:
    from deploy.cli.planning import booked_gpus, step_time

    gpus = booked_gpus(recipe)
    hours = step_time(recipe, shape, stated).total * recipe.limits.rollout_steps / 3600
    rows = [("GPUs, all of them for the whole run", f"{gpus:g}"), ("GPU-hours of training", f"{gpus * hours:,.0f}")]
    if price is not None:
        rows.append((f"cost at {price:g} a GPU-hour", f"{gpus * hours * price:,.0f}"))
    return _pairs("Cost, without starts and pauses", rows)


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table
