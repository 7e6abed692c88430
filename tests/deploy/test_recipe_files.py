"""The files beside a recipe: all commands read them from its folder alone, and check them as the API does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.recipe_files import load_with_files
from services.settings import RecipeError
from tests.deploy.command_line import NOWHERE, penstock
from tests.harness.small_run import recipe_document

SCORE = "def score(prompt, response, reference, metadata):\n    return 1.0\n"


def document(**verifier: Any) -> dict[str, Any]:
    rows = {"source": "jsonl", "path": "/rows.jsonl", "layout": "fields", "options": {}}
    data = {**rows, "verifier": "python:./rewards.py:score"}
    return recipe_document("/model", data=data, verifier=verifier)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a folder of its own, with its file."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(document()))
    (folder / "rewards.py").write_text(SCORE)
    return path


def refused(recipe: Path) -> str:
    """What validate, submit and eval say alike."""
    commands = (
        ["validate", str(recipe)],
        ["submit", str(recipe), "--api", NOWHERE],
        ["eval", "/model", "--recipe", str(recipe), "--api", NOWHERE],
        ["demo", "--recipe", str(recipe)],
    )
    said = set()
    for command in commands:
        status, output = penstock(*command)
        assert status == 2, output
        said.add(output)
    [output] = said
    return output.removeprefix("penstock: ").removesuffix("\n")


def test_files_are_read_from_the_folder_of_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = penstock("validate", str(recipe))
    assert (status, output.split("; ")[1]) == (0, "run 'tiny', 3 rollout steps, with ./rewards.py\n")
    monkeypatch.chdir(recipe.parent)
    _, files = load_with_files(Path(recipe.name))
    assert files == {"./rewards.py": SCORE}


def test_the_text_is_that_of_the_file_byte_by_byte(recipe: Path) -> None:
    text = "def score():\r\n\treturn 'é'\r"
    (recipe.parent / "rewards.py").write_bytes(text.encode())
    assert load_with_files(recipe)[1] == {"./rewards.py": text}


def test_a_missing_file_names_setting_file_and_folder(recipe: Path) -> None:
    (recipe.parent / "rewards.py").unlink()
    assert refused(recipe) == (
        f"data.verifier: './rewards.py' is not valid: expected a file in {recipe.parent}, which has none of that name"
    )


def test_all_files_that_cannot_be_read_are_named(recipe: Path) -> None:
    recipe.write_text(json.dumps(document(files=["./words.txt", "./lib/more.txt"])))
    (recipe.parent / "words.txt").write_bytes(b"caf\xe9")
    missing = f"a file in {recipe.parent}, which has none of that name"
    assert refused(recipe).split("\n") == [
        r"files './words.txt': b'\xe9' is not valid: expected UTF-8 (it is byte 4)",
        f"verifier.files: './lib/more.txt' is not valid: expected {missing}",
    ]


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_out_of_the_folder_is_refused(recipe: Path, link: str) -> None:
    secret = recipe.parent.parent / "secret" / "rewards.py"
    secret.parent.mkdir()
    secret.write_text(SCORE)
    (recipe.parent / "rewards.py").unlink()
    name = "./rewards.py"
    if link == "file":
        (recipe.parent / "rewards.py").symlink_to(secret)
    else:
        name = "./lib/rewards.py"
        (recipe.parent / "lib").symlink_to(secret.parent)
        recipe.write_text(recipe.read_text().replace("./rewards.py", name))
    expected = f"expected a file in {recipe.parent}, and not a link to {secret}"
    assert refused(recipe) == f"data.verifier: {name!r} is not valid: {expected}"


def test_a_link_within_the_folder_is_read(recipe: Path) -> None:
    (recipe.parent / "rewards.py").rename(recipe.parent / "version-2.py")
    (recipe.parent / "rewards.py").symlink_to("version-2.py")
    linked = recipe.parent.parent / "linked"
    linked.symlink_to(recipe.parent)
    assert load_with_files(linked / recipe.name)[1] == {"./rewards.py": SCORE}


def test_what_is_no_plain_file_is_refused_without_waiting(recipe: Path) -> None:
    (recipe.parent / "rewards.py").unlink()
    os.mkfifo(recipe.parent / "rewards.py")
    assert "expected a file in" in refused(recipe)


def test_a_large_file_is_refused_before_it_is_read(recipe: Path) -> None:
    with (recipe.parent / "rewards.py").open("wb") as file:
        file.truncate(2**40)
    expected = f"files './rewards.py': {2**40} is not valid: expected at most 262144 bytes of UTF-8"
    assert refused(recipe) == expected


def test_contents_are_checked_as_the_api_does(recipe: Path) -> None:
    (recipe.parent / "rewards.py").write_text("def grade(): ...")
    assert refused(recipe) == (
        "data.verifier: './rewards.py:score' is not valid: expected a function that './rewards.py' defines at top "
        "level: it has 'grade'"
    )


def test_a_file_that_may_not_be_read_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)  # tests may run as root, whom no mode stops
    with pytest.raises(RecipeError) as error:
        load_with_files(recipe)
    assert str(error.value) == f"data.verifier: './rewards.py' in {recipe.parent} cannot be read (Permission denied)"


def relative(**model: Any) -> dict[str, Any]:
    rows = {"source": "jsonl", "layout": "fields", "options": {}}
    sets = [{**rows, "name": "more", "path": "s3://bucket/more.jsonl"}]
    found = recipe_document("/model", data={**rows, "path": "../data/rows.jsonl"}, evaluation={"sets": sets})
    return found | {"model": {"path": "models/tiny", "max_model_len": 256, **model}}


@pytest.mark.parametrize("api", [None, "http://127.0.0.1:8470", "http://localhost:1/", "http://[::1]:8470"])
def test_relative_paths_begin_at_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch, api: str | None) -> None:
    recipe.write_text(json.dumps(relative()))
    monkeypatch.chdir(recipe.parent)
    for path in (recipe, Path(recipe.name)):
        loaded, _ = load_with_files(path, api)
        assert loaded.model.path == f"{recipe.parent}/models/tiny"
        assert loaded.data.path == f"{recipe.parent.parent}/data/rows.jsonl"
        assert loaded.evaluation.sets[0].path == "s3://bucket/more.jsonl"


@pytest.mark.parametrize(
    "api", ["https://penstock.example.org", "http://10.0.0.1:8470", "http://127.0.0.1.example.org"]
)
def test_relative_paths_are_not_for_another_machine(recipe: Path, api: str) -> None:
    recipe.write_text(json.dumps(relative()))
    with pytest.raises(RecipeError) as error:
        load_with_files(recipe, api)
    expected = f"expected an absolute path that the machines of {api} have, s3://... or ORG/NAME@REVISION"
    assert str(error.value).startswith(f"model.path: 'models/tiny' is not valid: {expected}")
    document = relative(path="org/tiny@main")
    document["data"]["path"] = "/data/rows.jsonl"
    recipe.write_text(json.dumps(document))
    assert load_with_files(recipe, api)[0].data.path == "/data/rows.jsonl"


@pytest.mark.parametrize("name", ["lib/chat.jinja", "./lib/chat.jinja", "lib/../lib/chat.jinja"])
def test_a_chat_template_travels_with_the_run(recipe: Path, name: str) -> None:
    (recipe.parent / "lib").mkdir()
    (recipe.parent / "lib/chat.jinja").write_text("{{ messages }}")
    recipe.write_text(json.dumps(relative(chat_template=name)))
    loaded, files = load_with_files(recipe)
    assert (loaded.model.chat_template, files) == ("./lib/chat.jinja", {"./lib/chat.jinja": "{{ messages }}"})


@pytest.mark.parametrize("name", ["none", "/no/chat.jinja", "s3://bucket/chat.jinja"])
def test_other_chat_templates_are_left_as_they_are(recipe: Path, name: str) -> None:
    recipe.write_text(json.dumps(relative(chat_template=name)))
    loaded, files = load_with_files(recipe)
    assert (loaded.model.chat_template, files) == (name, {})


def test_a_chat_template_outside_of_the_folder_is_refused(recipe: Path) -> None:
    secret = recipe.parent.parent / "chat.jinja"
    secret.write_text("{{ messages }}")
    (recipe.parent / "link.jinja").symlink_to(secret)
    table = {
        "../chat.jinja": "model.chat_template: './../chat.jinja' is not valid: expected ./FILE, a path below",
        "link.jinja": f"model.chat_template: './link.jinja' is not valid: expected a file in {recipe.parent}, and not",
    }
    for name, expected in table.items():
        recipe.write_text(json.dumps(relative(chat_template=name)))
        with pytest.raises(RecipeError) as error:
            load_with_files(recipe)
        assert str(error.value).startswith(expected)


def test_validate_checks_the_paths_that_exist_here(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ROOTS")
    monkeypatch.setenv("HOME", str(recipe.parent))
    monkeypatch.chdir(recipe.parent)
    recipe.write_text(json.dumps(relative()))
    assert penstock("validate", str(recipe))[0] == 0
    outside = recipe.parent.parent / "data/rows.jsonl"
    outside.parent.mkdir()
    outside.touch()
    status, output = penstock("validate", str(recipe))
    assert (status, f"data.path: '{outside}' is not valid: expected a path below one of" in output) == (2, True)
