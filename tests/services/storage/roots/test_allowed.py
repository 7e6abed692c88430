"""Below which folders and buckets a recipe may name files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.storage.places import StoreAddress
from services.storage.roots.allowed import PathFaultError, RootsError, load_roots


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only root, beside the runs folder `runs`, which this folder holds too."""
    folder = tmp_path / "shared"
    (folder / "data").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("PENSTOCK_ROOTS", f"{folder},s3://bucket/prefix")
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    return folder


def refused(text: str) -> str:
    with pytest.raises(PathFaultError) as error:
        load_roots().resolved(text)
    return str(error.value)


def test_a_path_below_a_root_is_allowed(root: Path) -> None:
    assert load_roots().resolved(f"{root}/data/new.jsonl") == root / "data/new.jsonl"
    assert load_roots().resolved(f"{root}/data/ünïcødé 数据.jsonl").name == "ünïcødé 数据.jsonl"
    assert load_roots().resolved(str(root)) == root


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/root/etc/shadow",
        "/dev/zero",
        "/sys/kernel",
        "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "/",
        "{root}-other/file",
        "{root}/.ssh/id_rsa",
        "{root}/data/.netrc",
    ],
)
def test_a_path_elsewhere_is_refused_with_the_roots(root: Path, text: str) -> None:
    fault = refused(text.replace("{root}", str(root)))
    assert fault.startswith(f"a path below one of {root}, {root.parent}/runs, s3://bucket/prefix (PENSTOCK_ROOTS)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{root}/../secret", "a path without `..`"),
        ("{root}/data/../../secret", "a path without `..`"),
        ("", "a path of 1 to 4096 characters (it has 0)"),
        ("/" + "a" * 10_000, "a path of 1 to 4096 characters (it has 10001)"),
        ("{root}/a\0b", "a path without NUL"),
        ("{root}/\ud800", "a path that can be written as UTF-8"),
    ],
)
def test_a_path_that_no_system_takes_is_refused(root: Path, text: str, expected: str) -> None:
    assert refused(text.replace("{root}", str(root))) == expected


def test_links_are_resolved_before_the_check(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (root / "out").symlink_to(secret)
    (root / "in").symlink_to("data")
    (root / "loop").symlink_to("loop")
    assert refused(f"{root}/out/file").startswith("a path below one of")
    assert load_roots().resolved(f"{root}/in/file") == root / "data/file"
    assert load_roots().resolved(f"{root}/loop").parent == root


def test_a_root_may_itself_be_a_link(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("PENSTOCK_ROOTS", f"{tmp_path}/link")
    assert load_roots().resolved(f"{tmp_path}/link/data") == root / "data"
    assert load_roots().resolved(f"{root}/data") == root / "data"


def test_a_hidden_folder_can_be_a_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".cache/models").mkdir(parents=True)
    assert refused(f"{root}/.cache/models").startswith("a path below one of")
    monkeypatch.setenv("PENSTOCK_ROOTS", f"{root}:{root}/.cache")
    assert load_roots().resolved(f"{root}/.cache/models") == root / ".cache/models"


def test_the_runs_folder_is_allowed_but_not_its_secrets(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for allowed in ("models/tiny", "inputs/s3-1", "one/export", "data/rows.jsonl", "models/rewards"):
        assert load_roots().resolved(f"{runs}/{allowed}") == runs / allowed
    secrets = ("one/rewards/judge.py", "one/batches", "one/run.json", "one/run.e0002-b.json", "one/logs/sampler.log")
    for private in (*secrets, "one/groups", "one/groups/g1.parquet", "one/mlflow/mlflow.db", "one/wandb"):
        assert refused(f"{runs}/{private}") == f"of another run only its export, {runs}/RUN/export"
    (runs / "one").mkdir()
    (runs / "one/run.json").touch()
    (runs / "two/groups").mkdir(parents=True)
    for private in (
        "one",
        "one/curves",
        "one/curves/events",
        "two",
        "two/tensorboard",
    ):  # a tracker's folder has any name
        assert refused(f"{runs}/{private}") == f"of another run only its export, {runs}/RUN/export"
    assert load_roots().resolved(f"{runs}/one/export/model") == runs / "one/export/model"
    for hidden in (".stack", ".stack/valkey/appendonly.aof", ".penstock-runs"):
        assert refused(f"{runs}/{hidden}").startswith("a path below one of")
    assert refused(str(runs)) == f"a folder that does not hold the runs folder, {runs}"


def test_no_root_opens_the_stack_s_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", f"{tmp_path}/runs/.stack,{tmp_path}")
    assert refused(f"{tmp_path}/runs/.stack/valkey").startswith("a path below one of")
    assert refused(f"{tmp_path}").startswith("a folder that does not hold the runs folder")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("s3://bucket/prefix", True),
        ("s3://bucket/prefix/models/a", True),
        ("s3://bucket/prefixed/models", False),
        ("s3://bucket", False),
        ("s3://other/prefix", False),
        ("s3://bucket/prefix/../secret", False),
        ("s3://Bucket/prefix", False),
        ("s3://store/runs/one/export", True),
        ("s3://store/runs/models/a", True),
        ("s3://store/runs/one/rewards/judge.py", False),
        ("s3://store/runs/one/groups", False),
        ("s3://store/runs/one/run.e0002-b.json", False),
        ("s3://store/runs", False),
    ],
)
def test_addresses_are_allowed_below_roots_and_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: str, allowed: bool
) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", "s3://store/runs")
    if allowed:
        assert str(load_roots().address(text)) == text
        return
    with pytest.raises(PathFaultError):
        load_roots().address(text)


def test_the_list_takes_commas_and_colons(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", f" {root}:s3://one/a , s3://two:{tmp_path},")
    found = load_roots()
    assert found.folders == (root, tmp_path)
    assert found.stores == (StoreAddress("one", "a"), StoreAddress("two", ""))


@pytest.mark.parametrize(
    "entry",
    [
        "/",
        "/etc",
        "/etc/models",
        "/proc/1",
        "relative",
        "~",
        "/data/../etc",
        "s3://",
        "s3://B/x",
        "hf://a/b",
        "/a\ud800",
    ],
)
def test_a_root_that_cannot_be_one_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"PENSTOCK_ROOTS": f"{root},{entry}"})
    with pytest.raises(RootsError, match=r"^PENSTOCK_ROOTS: .* is not valid: expected "):
        load_roots()


def test_a_laptop_allows_home_working_folder_and_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "work"
    for folder in (home / ".ssh", here):
        folder.mkdir(parents=True)
    for name in ("PENSTOCK_ROOTS", "PENSTOCK_RUNS", "PENSTOCK_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    roots = load_roots()
    assert roots.folders == (home, here)
    assert roots.resolved(f"{home}/models/a") == home / "models/a"
    assert roots.address("s3://any/thing").bucket == "any"
    for text in (f"{home}/.ssh/id_rsa", f"{home}/.aws/credentials", "/etc/passwd", "/mnt/data"):
        assert refused(text).startswith(f"a path below one of {home}, {here}, any s3://BUCKET")
    monkeypatch.chdir(home / ".ssh")
    assert load_roots().folders == (home,)


@pytest.mark.parametrize("home", ["/", "/etc", "/proc/self"])
def test_a_laptop_s_home_may_be_no_root(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("PENSTOCK_ROOTS", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir("/")
    assert load_roots().folders == ()


def test_an_empty_list_leaves_the_runs_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", "")
    assert str(load_roots()) == f"{tmp_path}/runs"
    assert refused(f"{root}/data").startswith("a path below one of")
