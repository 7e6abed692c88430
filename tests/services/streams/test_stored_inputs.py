"""What a recipe names in a store: training data, evaluation sets, the model, the chat template."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.cli.commands.evaluate import _model
from deploy.local.preflight import StackError, check_model
from services.sampler.data import load_evaluated, load_splits
from services.sampler.data.rows import DataError
from services.settings import DataSettings, EvaluationSet, parse_recipe
from services.storage import models
from services.storage.errors import StoreError, StoreOutageError
from services.storage.folders import put_folder
from services.storage.models import local_model
from services.storage.objects import put_bytes
from services.storage.places import parse_address
from tests.harness.servers.s3_server import S3Server
from tests.harness.small_run import recipe_document

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))


def url(name: str) -> str:
    return f"{os.environ['PENSTOCK_STORE']}/{name}"


def test_questions_are_read_from_the_store(store: S3Server, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(6)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    put_bytes(parse_address(url("data/train.jsonl"), "x"), lines.encode())
    data = DataSettings(source="jsonl", path=url("data/train.jsonl"), layout="fields", train=4, held_out=2)
    splits = load_splits(data)
    assert (len(splits.train), len(splits.held_out)) == (4, 2)
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[:3]), tmp_path / "set/test-00000-of-00001.parquet")
    put_folder(parse_address(url("data/aime"), "x"), tmp_path / "set")
    stored = EvaluationSet(name="aime", source="hf", path=url("data/aime"), split="test", layout="fields")
    assert len(load_evaluated(None, (stored,)).sets["aime"]) == 3
    gone = stored.model_copy(update={"path": url("data/gone")})
    with pytest.raises(DataError, match=r"evaluation\.sets 'aime'\.path: 's3://.*/data/gone' is not valid"):
        load_evaluated(None, (gone,))


def test_model_of_a_recipe_is_checked_before_the_start(store: S3Server, tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_document(url("models/tiny")))
    with pytest.raises((StoreError, StackError), match=r"model\.path: 's3://.*config\.json' is not valid"):
        check_model(recipe)
    put_bytes(parse_address(url("models/tiny/config.json"), "x"), b"{}")
    check_model(recipe)
    assert _model(url("models/tiny")) == {"path": url("models/tiny")}
    assert local_model(url("models/tiny"), tmp_path / "models").joinpath("config.json").is_file()


def test_a_process_waits_for_its_files_at_startup(
    own_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "RETRY_S", 0.1)
    put_bytes(parse_address(url("template.jinja"), "x"), b"{{ messages }}")
    own_store.kill()
    back = threading.Timer(3.0, own_store.start)
    back.start()
    assert models.local_file(url("template.jinja"), "model.chat_template").read_text() == "{{ messages }}"
    back.join()
    own_store.kill()
    monkeypatch.setattr(models, "OUTAGE_S", 0.0)
    with pytest.raises(StoreOutageError):
        models.local_file(url("template.jinja"), "model.chat_template")
