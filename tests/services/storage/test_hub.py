"""Models and data of the hub: resolved once, fetched once, the same for every later process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.storage.errors import StoreError, StoreOutageError
from services.storage.hub import copies
from services.storage.hub.copies import hub_config, hub_copy, pinned_name
from services.storage.models import local_model
from services.storage.places import configured_store
from tests.harness.free_ports import free_port
from tests.harness.servers.hub_server import STRANGER, TOKEN, HubServer, files_of
from tests.harness.servers.s3_server import S3Server

pytestmark = pytest.mark.timeout(120)

NAME = "org/tiny"
UNNEEDED = ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "modeling.py", "README.md", ".gitattributes")
EXTRA = dict.fromkeys(UNNEEDED, b"x")


@pytest.fixture
def files(tiny_model: Path) -> dict[str, bytes]:
    """The files of the tiny model."""
    return files_of(tiny_model)


def pin(cache: Path, revision: str = "main", **more: float) -> str:
    return pinned_name(f"{NAME}@{revision}", "model.path", "model", cache, **more)


def copy(name: str, cache: Path) -> Path:
    return hub_copy(name, "model.path", "model", cache)


def test_needed_files_come_once_by_commit_and_digest(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    repository = hub.model(NAME, files | EXTRA)
    name = pin(tmp_path)
    commit = repository.branches["main"]
    assert name.startswith(f"hf://{NAME}@{commit}#")
    folder = copy(name, tmp_path)
    assert files_of(folder).keys() - {".penstock.json"} == files.keys()
    assert all((folder / file).read_bytes() == content for file, content in files.items())
    assert {urlsplit(request).path.split("/")[-1] for request in hub.requests if "/api/" in request} == {"main", commit}
    once = len(hub.transfers())
    assert pin(tmp_path) == name
    assert copy(name, tmp_path) == local_model(name, tmp_path) == folder
    assert len(hub.transfers()) == once
    assert not hub.leaked, "the token went to another host"


def test_a_moved_branch_changes_later_runs_only(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    repository = hub.model(NAME, files)
    before = pin(tmp_path / "a")
    repository.commit(files | {"config.json": files["config.json"] + b" "})
    assert pin(tmp_path / "a") != before
    assert pinned_name(before, "model.path", "model", tmp_path / "b") == before  # prepared again for a resumed run
    for cache in (tmp_path / "a", tmp_path / "b"):
        assert (copy(before, cache) / "config.json").read_bytes() == files["config.json"]


def test_a_pinned_name_is_refused_with_other_files(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    name = pin(tmp_path)
    wrong = f"{name.partition('#')[0]}#{'0' * 64}"
    for cache in (tmp_path, tmp_path / "other"):
        with pytest.raises(StoreError, match=r"model\.path: 'hf://.*' has other files than when the run started"):
            pinned_name(wrong, "model.path", "model", cache)
    with pytest.raises(StoreError, match=r"has other files than when the run started"):
        copy(wrong, tmp_path)
    hub.requests.clear()
    with pytest.raises(StoreError, match=r"has no copy in .* nor in a store; resume the run"):
        copy(name, tmp_path / "third")
    assert not hub.requests, "a service asked the hub"


def test_a_cut_transfer_continues_in_the_file(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    hub.cuts[:] = [700, 5000]
    assert (copy(pin(tmp_path), tmp_path) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_an_interrupted_download_continues(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    program = download_program(tmp_path)

    def there() -> list[str]:
        """The files that the library would not fetch again: it notes each in three lines after it has moved it."""
        notes = ".hf-*.download/tiny/.cache/huggingface/download"
        found = {name: list(tmp_path.glob(f"{notes}/{name}.metadata")) for name in files}
        return [name for name, note in found.items() if note and note[0].read_text().count("\n") == 3]

    def kill() -> None:
        """Files arrive side by side: while the large one is asked for, wait until another has arrived."""
        ends = time.monotonic() + 60
        while not there() and time.monotonic() < ends:
            time.sleep(0.01)
        program.kill()

    hub.on_transfer = kill
    assert program.wait(120) < 0
    assert not list(tmp_path.glob("hf-*"))
    arrived = there()
    hub.on_transfer = lambda: None
    hub.requests.clear()
    assert copy(pin(tmp_path), tmp_path).joinpath("config.json").is_file()
    again = [request for request in hub.transfers() for name in arrived if request.endswith(f"/{name}")]
    assert arrived
    assert not again, "a file that had arrived was fetched again"
    assert not list(tmp_path.glob(".hf-*.download"))


def test_what_a_killed_process_left_of_a_file_is_deleted(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    """The library gives each attempt's file another name, so leftovers would fill the disk."""
    hub.model(NAME, files)
    for attempt in range(3):
        program = download_program(tmp_path)
        hub.on_transfer = program.kill  # only large files are transfers of their own
        assert program.wait(120) < 0
        [folder] = tmp_path.glob(".hf-*.download/tiny/.cache")
        left = [path.name for path in folder.rglob("*.incomplete")]
        assert f"planted-{attempt - 1}.incomplete" not in left
        (folder / f"planted-{attempt}.incomplete").write_bytes(bytes(1000))
    hub.on_transfer = lambda: None
    assert copy(pin(tmp_path), tmp_path).joinpath("model.safetensors").read_bytes() == files["model.safetensors"]


def download_program(cache: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from services.storage.hub.address import HubAddress;"
        "from services.storage.hub.download import download;"
        f"download(HubAddress('model', {NAME!r}, 'main'), Path(sys.argv[1]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(cache)], stderr=subprocess.DEVNULL)


def test_two_processes_at_once_fetch_each_file_once(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    programs = [download_program(tmp_path) for _ in range(2)]
    assert [program.wait(60) for program in programs] == [0, 0]
    assert len(set(hub.transfers())) == len(hub.transfers())


def test_wrong_content_is_never_put_in_place(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    weights = files["model.safetensors"]
    hub.model(NAME, files)
    faults = {weights[:-1] + b"x": "'model.safetensors' arrived damaged", weights[:-100]: "did not answer as expected"}
    for wrong, fault in faults.items():
        hub.replaced = {weights: wrong}
        with pytest.raises(StoreError, match=rf"^model\.path: 'org/tiny@main' cannot be downloaded: .*{fault}"):
            pin(tmp_path)
        assert not list(tmp_path.glob("hf-*"))
    hub.replaced = {}
    assert (copy(pin(tmp_path), tmp_path) / "model.safetensors").read_bytes() == weights


def test_a_busy_hub_is_asked_again(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    hub.statuses[:] = [503, 502]
    later = [500, 429, 503]

    def become_busy() -> None:
        hub.statuses, later[:] = hub.statuses + later, []

    hub.on_listing = become_busy
    assert pin(tmp_path)
    assert hub.statuses == later == []


def test_a_hub_that_stays_away_is_an_outage(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:password@127.0.0.1:{free_port()}")
    with pytest.raises(StoreOutageError, match=r"downloaded: http://127\.0.* did not answer as expected \(Conn"):
        pin(tmp_path)
    written = capfd.readouterr().err
    assert written.count("did not answer as expected (ConnectError); retry in 1 s") == 3
    assert "password" not in written


def test_a_download_has_a_deadline(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    with pytest.raises(StoreOutageError, match=r"'org/tiny@main' was not downloaded within 0\.01 s"):
        pin(tmp_path, deadline_s=0.01)


def test_gated_and_private_repositories_name_the_token(
    hub: HubServer,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gated, private = hub.model(NAME, files), hub.model("org/own", files)
    gated.gated = private.private = True
    asked = {"org/tiny@main": "gated, and {}; set HF_TOKEN to a token with access", "org/own@main": "private and {}"}
    for token, fault in (("", "HF_TOKEN is not set"), (STRANGER, "the token in HF_TOKEN has no access to it")):
        monkeypatch.setenv("HF_TOKEN", token)
        for text, expected in asked.items():
            with pytest.raises(StoreError) as raised:
                pinned_name(text, "model.path", "model", tmp_path)
            assert str(raised.value).startswith(f"model.path: '{text}' cannot be downloaded: ")
            assert expected.format(fault) in str(raised.value)
            assert not isinstance(raised.value, StoreOutageError)
            assert STRANGER not in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    name = pin(tmp_path)
    written = "".join(capfd.readouterr()) + name
    written += "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "hf://org/tiny" in written
    assert not [secret for secret in (TOKEN, STRANGER, "signature-that") if secret in written]
    assert not hub.leaked


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("org/none@main", "has no such model repository, or it is private and HF_TOKEN is not set"),
        ("org/tiny@none", "it has no revision 'none'; expected a branch, a tag or a commit"),
        ("org/pickled@main", r"it has no weights as safetensors .*pickled weights are refused"),
        ("org/bare@main", r"it has no config\.json.*; 1 files: 'model\.safetensors'"),
        (
            "org/index@main",
            r"its model\.safetensors\.index\.json names weights that it has not: 1 files: '\.\./\.\./secret",
        ),
    ],
)
def test_what_cannot_be_a_model_is_named(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path, text: str, fault: str
) -> None:
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "../../secret.safetensors"}}
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    hub.model(NAME, files)
    hub.model("org/pickled", rest | EXTRA)
    hub.model("org/bare", {"model.safetensors": b"x"})
    sharded = {"model.safetensors.index.json": json.dumps(index).encode(), "model-00001-of-00001.safetensors": b"x"}
    hub.model("org/index", rest | sharded)
    with pytest.raises(StoreError, match=rf"^model\.path: '{text}' cannot be downloaded: .*{fault}"):
        pinned_name(text, "model.path", "model", tmp_path)
    assert not list(tmp_path.glob("hf-*"))


def test_offline_needs_a_copy(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.model(NAME, files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StoreError, match=r"cannot be downloaded: HF_HUB_OFFLINE is set, and .* has no copy"):
        pin(tmp_path)
    # As in a service's process, for which Penstock sets HF_HUB_OFFLINE.
    monkeypatch.setenv(copies.OFFLINE, "")
    name = pin(tmp_path)
    monkeypatch.setenv(copies.OFFLINE, "1")
    hub.requests.clear()
    assert pin(tmp_path) == name
    assert copy(name, tmp_path).is_dir()
    assert not hub.requests


def test_a_full_disk_is_reported_before_the_download(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.model(NAME, files)
    monkeypatch.setattr(copies.sys, "executable", str(small_disk(tmp_path)))
    with pytest.raises(StoreError, match=r"cannot be downloaded: .* needs 0\.00 GiB for it, and has 0\.00 free"):
        pin(tmp_path / "cache")
    assert not hub.transfers()


def small_disk(folder: Path) -> Path:
    """A Python that finds its disk full."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport runpy, shutil, sys\n"
        "full = shutil.disk_usage('/')._replace(free=100)\n"
        "shutil.disk_usage = lambda path: full\n"
        "sys.argv = sys.argv[2:]\nrunpy.run_module(sys.argv[0], run_name='__main__')\n"
    )
    script.chmod(0o755)
    return script


def test_plan_needs_the_config_alone(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.model(NAME, files)
    assert (hub_config(f"{NAME}@main", tmp_path) / "config.json").read_bytes() == files["config.json"]
    assert [request.rpartition("/")[2] for request in hub.transfers()] == ["config.json"]


def test_a_local_folder_of_that_name_is_ambiguous(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.model(NAME, files)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/tiny@main").mkdir(parents=True)
    with pytest.raises(
        StoreError, match=r"^model\.path: 'org/tiny@main' is ambiguous: .*; expected \./org/tiny@main or"
    ):
        pin(tmp_path / "cache")
    assert pinned_name("hf://org/tiny@main", "model.path", "model", tmp_path / "cache")
    assert os.listdir(tmp_path / "org/tiny@main") == []


def test_other_nodes_take_a_model_from_the_store(
    hub: HubServer, store: S3Server, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.model(NAME, files)
    name = pin(tmp_path / "a")
    hub.requests.clear()
    assert pin(tmp_path / "b") == name  # a second run, prepared on another node
    assert [request.split("/")[-1] for request in hub.requests] == ["main"], "only the commit comes from the hub"
    hub.requests.clear()
    assert pinned_name(name, "model.path", "model", tmp_path / "f") == name
    folder = local_model(name, tmp_path / "c")
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert not hub.requests
    stored = f"{configured_store().key}/models/{folder.parent.name}/tiny"
    store.damaged(f"{stored}/config.json", files["config.json"].replace(b"128", b"129"))
    with pytest.raises(StoreError, match=r"/config\.json: damaged"):
        local_model(name, tmp_path / "d")
    # An upload that was cut off has no manifest: preparation takes the files from the hub, of the same commit.
    store.damaged(f"{stored}/.penstock.json", None)
    with pytest.raises(StoreError, match=r"has no copy"):
        local_model(name, tmp_path / "e")
    assert pinned_name(name, "model.path", "model", tmp_path / "e") == name
    assert files_of(local_model(name, tmp_path / "e")) == files_of(folder)
    assert hub.requests
