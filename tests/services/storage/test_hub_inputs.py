"""A run's model and data of the hub: what the controller records, what its services and a plan then read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.commands.evaluate import _model
from deploy.hosting import environment
from deploy.local.preflight import check_model
from learner.model.shape import model_shape
from learner.model.source import ModelSourceError, record_name
from services.sampler.data import DataError, load_splits
from services.settings import ModelSettings, parse_recipe
from services.storage.errors import StoreOutageError
from services.storage.hub import copies
from services.storage.hub.copies import OFFLINE, pinned_data
from services.storage.models import local_data, local_model
from services.streams.state.runs import RunRecords
from tests.harness.servers.hub_server import TOKEN, HubServer, files_of
from tests.harness.small_run import recipe_document

pytestmark = pytest.mark.timeout(120)

DATA, SET = "org/sums@main/train.jsonl", "hf://datasets/org/sums/test.csv"


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))


def rows(numbers: range) -> bytes:
    return b"".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}).encode() + b"\n" for n in numbers)


def hub_recipe() -> dict[str, Any]:
    fields = {"layout": "fields"}
    return recipe_document(
        "org/tiny@main",
        data={"source": "jsonl", "path": DATA, "train": 4, "held_out": 2, "options": {}, **fields},
        evaluation={"sets": [{"name": "test", "source": "csv", "path": SET, **fields}]},
    )


async def test_a_sampler_reads_the_data_as_it_was_resolved(
    hub: HubServer, redis: Any, run_id: str, tmp_path: Path
) -> None:
    repository = hub.dataset("org/sums", {"train.jsonl": rows(range(6)), "test.csv": b"question,answer\n9 + 9?,18\n"})
    fields = {DATA: "data.path", SET: "evaluation.sets 'test'.path"}
    inputs = pinned_data(fields, tmp_path / "runs/inputs", 60.0)
    repository.commit({"train.jsonl": rows(range(90, 96)), "test.csv": b"question,answer\n7 + 7?,14\n"})
    records = RunRecords(redis)
    assert (await records.create(run_id, parse_recipe(hub_recipe()))).inputs == {}
    await records.set_paths(run_id, model_path="/model", inputs=json.dumps(inputs))
    record = await records.get(run_id)
    assert record.inputs == inputs
    assert record.recipe.data.path == DATA
    recipe = record.pinned_recipe
    splits = load_splits(recipe.data, recipe.evaluation.sets)
    texts = {prompt.messages[-1]["content"] for prompt in (*splits.train, *splits.held_out, *splits.sets["test"])}
    assert texts == {"9 + 9?", *(f"{n} + 1?" for n in range(6))}
    gone = recipe.data.model_copy(update={"path": inputs[DATA].replace("train.jsonl", "none.jsonl")})
    with pytest.raises(DataError, match=r"^data\.path: '.*/none\.jsonl.*' has no copy in .*; resume the run"):
        load_splits(gone)
    assert local_data(inputs[DATA], "data.path").read_bytes() == rows(range(6))


def test_a_stored_path_with_an_at_sign_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_data("sets/aime@2024.jsonl", "data.path") == tmp_path / "sets/aime@2024.jsonl"
    assert local_model("models/tiny@2024", tmp_path) == tmp_path / "models/tiny@2024"


def test_data_sets_share_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, now = [], [0.0]

    def pin(text: str, field: str, kind: str, cache: Path, deadline_s: float) -> str:
        given.append(deadline_s)
        now[0] += 10.0
        return text

    monkeypatch.setattr(copies, "pinned_name", pin)
    monkeypatch.setattr(copies.time, "monotonic", lambda: now[0])
    pinned_data({"a": "data.path", "b": "data.path", "c": "data.path"}, tmp_path, 60.0)
    assert given == [60.0, 50.0, 40.0]


def test_the_record_names_a_model_that_every_command_takes(
    hub: HubServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, text = files_of(tiny_model), "org/tiny@main"
    hub.model("org/tiny", files)
    recipe, cache = parse_recipe(hub_recipe()), tmp_path / "models"
    check_model(recipe)
    assert _model(text) == {"path": text}
    assert model_shape(recipe.model, cache) == model_shape(ModelSettings(path=str(tiny_model)), cache)
    assert not [request for request in hub.transfers() if "cdn" in request], "a plan needs no weights"
    name = record_name(recipe.model, cache)
    assert (local_model(name, cache) / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert record_name(ModelSettings(path=name), cache) == name, "what a record names can be given in a recipe"
    with pytest.raises(ModelSourceError, match=r"^model\.path: 'org/none@main' cannot be downloaded: "):
        record_name(ModelSettings(path="org/none@main"), cache)
    with pytest.raises(ModelSourceError, match=r"'org/none' is not valid: expected .*, or ORG/NAME@REVISION; no such"):
        record_name(ModelSettings(path="org/none"), cache)
    hub.statuses[:] = [503] * 9
    with pytest.raises(StoreOutageError):
        record_name(ModelSettings(path="org/tiny@other"), cache)


def test_only_preparation_keeps_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert environment.head_environment("127.0.0.1", "/runs")["HF_TOKEN"] == TOKEN
    assert environment.service_environment(1, 1.0)["HF_TOKEN"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment.service_environment(1, 1.0), "Ray sets it"
    assert environment.service_environment(1, 0.0)["CUDA_VISIBLE_DEVICES"] == ""
    assert "HF_TOKEN" not in environment.process_environment(1), "Ray shows these to all that ask it"
    for asked in ("", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", asked)
        for variables in (environment.head_environment("127.0.0.1", "/runs"), environment.cluster_environment()):
            assert (variables["HF_HUB_OFFLINE"], variables[OFFLINE]) == ("1", asked)
