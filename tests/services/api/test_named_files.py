"""Which files a submitted recipe may name, and what a refusal says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from services.api.addresses import checked_addresses, checked_here
from services.settings import ClusterLimitsError, RecipeError, parse_recipe
from tests.harness.small_run import recipe_document

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only root, with a model's folder, data and a template."""
    folder = tmp_path / "shared"
    (folder / "model").mkdir(parents=True)
    (folder / "rows.jsonl").touch()
    (folder / "chat.jinja").touch()
    monkeypatch.setenv("PENSTOCK_ROOTS", f"{folder},s3://bucket/prefix")
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    return folder


def document(root: Path, **paths: str) -> dict[str, Any]:
    rows = {"source": "jsonl", "layout": "fields", "options": {}}
    model = {"path": f"{root}/model", "chat_template": f"{root}/chat.jinja", "max_model_len": 256}
    for name in ("path", "chat_template"):
        if (given := paths.get(f"model_{name}")) is not None:
            model[name] = given
    sets = [{**rows, "name": "more", "path": paths.get("set_path", f"{root}/rows.jsonl")}]
    return recipe_document("/model", data={**rows, "path": paths.get("data_path", f"{root}/rows.jsonl")}) | {
        "model": model,
        "evaluation": {"sets": sets},
    }


def faults(root: Path, **paths: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        checked_addresses(parse_recipe(document(root, **paths)))
    return str(error.value).split("\n")


def test_paths_below_a_root_are_accepted(root: Path) -> None:
    checked_addresses(parse_recipe(document(root)))
    checked_addresses(parse_recipe(document(root, model_path="s3://bucket/prefix/m", model_chat_template="./c.jinja")))
    checked_addresses(parse_recipe(document(root, model_path="org/name@main", model_chat_template="none")))


def test_every_path_of_a_recipe_is_checked(root: Path) -> None:
    everywhere = dict.fromkeys(("model_path", "model_chat_template", "data_path", "set_path"), "/etc/passwd")
    expected = f"is not valid: expected a path below one of {root}, s3://bucket/prefix (PENSTOCK_ROOTS)"
    fields = ["model.chat_template", "model.path", "data.path", "evaluation.sets 'more'.path"]
    found = faults(root, **everywhere)
    assert [fault.split(": ")[0] for fault in found] == fields
    assert all(expected in fault for fault in found)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/proc/self/environ", "a path below one of"),
        ("/dev/stdin", "a path below one of"),
        ("s3://bucket/other", "an address below one of"),
        ("s3://bucket/prefix/../other", "a path without `..`"),
        ("{root}/../rows.jsonl", "a path without `..`"),
        ("{root}/rows\0.jsonl", "a path without NUL"),
        ("{root}/none.jsonl", "a file that exists"),
        ("{root}/model", "a file; it is a folder"),
        ("rows.jsonl", "an absolute path: a relative one begins at the recipe's folder"),
        ("./rows.jsonl", "an absolute path: a relative one begins at the recipe's folder"),
        ("../rows.jsonl", "a path without `..`"),
    ],
)
def test_a_refusal_says_what_is_expected(root: Path, path: str, expected: str) -> None:
    path = path.replace("{root}", str(root))
    [fault] = faults(root, data_path=path)
    assert fault.startswith(f"data.path: {path!r} is not valid: expected {expected}")


def test_a_long_value_is_cut(root: Path) -> None:
    [fault] = faults(root, data_path=f"/{'é' * 100_000}")
    assert fault.startswith(f"data.path: '/{'é' * 199}' is not valid: expected a path of 1 to 4096 characters")
    assert len(faults(root, model_path="hf://" + "a" * 100_000)[0]) < 1000


def test_a_link_and_a_pipe_are_refused(root: Path) -> None:
    (root / "link").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe")
    assert "expected a path below one of" in faults(root, data_path=f"{root}/link")[0]
    assert faults(root, data_path=f"{root}/pipe")[0].endswith("expected a file; it is a pipe")


@pytest.mark.parametrize(
    "name", ["./../chat.jinja", "./a/../../x", "./" + "a" * 300, "./.ssh", "./a b", ".//etc/passwd"]
)
def test_a_template_s_name_stays_in_the_run_s_folder(root: Path, name: str) -> None:
    [fault] = faults(root, model_chat_template=name)
    assert fault.startswith("model.chat_template: ")
    assert "expected ./FILE, a path below the recipe's folder" in fault


def test_what_this_machine_cannot_see_is_accepted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", "/of-a-node")
    recipe = parse_recipe(
        document(root, **dict.fromkeys(("model_path", "model_chat_template", "data_path", "set_path"), "/of-a-node/x"))
    )
    assert checked_addresses(recipe) is recipe


def test_a_command_checks_what_is_on_its_machine(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_ROOTS")
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.chdir(root)
    elsewhere = document(root, data_path="/data-of-a-cluster/rows.jsonl", set_path="s3://any/rows.jsonl")
    checked_here(parse_recipe(elsewhere))
    (tmp_path / "rows.jsonl").touch()
    for path in ("rows.jsonl", f"{tmp_path}/rows.jsonl"):
        with pytest.raises(RecipeError, match=r"^data\.path: "):
            checked_here(parse_recipe(document(root, data_path=path)))
    monkeypatch.setenv("PENSTOCK_ROOTS", str(root))
    with pytest.raises(
        RecipeError, match=r"^data\.path: '/data-of-a-cluster/rows.jsonl' is not valid: .*PENSTOCK_ROOTS"
    ):
        checked_here(parse_recipe(elsewhere))


def test_roots_that_cannot_be_used_are_the_operator_s_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", "/etc")
    with pytest.raises(ClusterLimitsError, match=r"^PENSTOCK_ROOTS: '/etc' is not valid: expected absolute folders"):
        checked_addresses(parse_recipe(document(root)))


async def test_the_api_answers_422(api: Any, root: Path, run_id: str) -> None:
    answer = await api.post(
        "/v1/runs", json={"id": run_id, "recipe": document(root, model_chat_template="/etc/passwd")}
    )
    assert answer.status_code == 422
    assert "model.chat_template: '/etc/passwd' is not valid: expected a path below one of" in answer.text
    assert "root:" not in answer.text
