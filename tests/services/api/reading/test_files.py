"""Checkpoints and exports: listed with digests, downloaded in ranges, and nothing else of the machine."""

import hashlib
import json
import os

import pytest

from services.api.routes.reading.files import span_of
from services.settings import Recipe
from services.storage import objects
from services.storage.folders import put_folder
from services.storage.places import configured_store
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

NAME = "step-000010.e0001-learner.3f9a2c1b"
CONTENT = bytes(range(256)) * 8192
DIGEST = hashlib.sha256(CONTENT).hexdigest()
MANIFEST = {"step": 10, "version": 12, "files": {"rank-0000.safetensors": {"size": len(CONTENT), "sha256": DIGEST}}}


@pytest.fixture
async def folder(redis, run_id, tmp_path, monkeypatch):
    """The folder of a run with a checkpoint and an export."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    records = RunRecords(redis)
    await records.create(run_id, Recipe.model_validate(recipe_document("/none")))
    own = tmp_path / "runs" / run_id
    for place, name in ((f"checkpoints/{NAME}", "rank-0000.safetensors"), ("export", "model.safetensors")):
        (own / place).mkdir(parents=True)
        (own / place / name).write_bytes(CONTENT)
    (own / "checkpoints" / NAME / "checkpoint.json").write_text(json.dumps(MANIFEST))
    await records.set_paths(run_id, export_path=str(own / "export"))
    (own / "secret.txt").write_text("secret")
    (tmp_path / "outside.txt").write_text("secret")
    return own


async def test_checkpoints_are_listed_with_digests(api, folder, run_id):
    (folder / "checkpoints" / ".step-000020.e0001-learner.partial").mkdir()
    damaged = folder / "checkpoints" / "step-000030.e0001-learner.00000000"
    damaged.mkdir()
    (damaged / "checkpoint.json").write_bytes(b"\xff" * 10 + b"[" * 100_000)
    [found] = (await api.get(f"/v1/runs/{run_id}/checkpoints")).json()["checkpoints"]
    assert (found["name"], found["step"], found["version"]) == (NAME, 10, 12)
    files = {file["name"]: (file["size"], file["sha256"]) for file in found["files"]}
    assert files["rank-0000.safetensors"] == (len(CONTENT), DIGEST)


async def test_an_export_is_listed_and_digested_on_request(api, folder, run_id):
    answer = (await api.get(f"/v1/runs/{run_id}/export")).json()
    assert answer == {
        "place": str(folder / "export"),
        "files": [{"name": "model.safetensors", "size": len(CONTENT), "sha256": None}],
    }
    [file] = (await api.get(f"/v1/runs/{run_id}/export", params={"digests": True})).json()["files"]
    assert file["sha256"] == DIGEST


async def test_names_that_no_address_has_are_not_listed(api, folder, run_id):
    export = os.fsencode(folder / "export")
    for name in (b"bad\xff.txt", b"two\nlines", b"caf\xc3\xa9 1.txt"):
        os.close(os.open(os.path.join(export, name), os.O_CREAT | os.O_WRONLY))
    for digests in (False, True):
        answer = await api.get(f"/v1/runs/{run_id}/export", params={"digests": digests})
        assert [file["name"] for file in answer.json()["files"]] == ["café 1.txt", "model.safetensors"]


async def test_a_range_of_a_file_that_was_replaced_is_the_whole(api, folder, run_id):
    route = f"/v1/runs/{run_id}/export/model.safetensors"
    whole = await api.get(route)
    asked = {"range": "bytes=10-19"}
    same = await api.get(route, headers=asked | {"if-range": whole.headers["etag"]})
    other = await api.get(route, headers=asked | {"if-range": '"another"'})
    assert (same.status_code, same.content) == (206, CONTENT[10:20])
    assert (other.status_code, other.content) == (200, CONTENT)


async def test_a_run_without_files_has_none(api, redis, run_id):
    await RunRecords(redis).create(run_id, Recipe.model_validate(recipe_document("/none")))
    assert (await api.get(f"/v1/runs/{run_id}/export")).json() == {"place": None, "files": []}
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints")).json() == {"checkpoints": []}
    assert (await api.get(f"/v1/runs/{run_id}/export/model.safetensors")).status_code == 404


async def test_a_file_is_downloaded_whole(api, folder, run_id):
    for path in (f"checkpoints/{NAME}/rank-0000.safetensors", "export/model.safetensors"):
        answer = await api.get(f"/v1/runs/{run_id}/{path}")
        assert (answer.status_code, answer.content) == (200, CONTENT)
        assert answer.headers["accept-ranges"] == "bytes"
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")


RANGES = [
    ("bytes=0-0", 206, (0, 1)),
    ("bytes=5-1048580", 206, (5, 1048581)),
    ("bytes=100-", 206, (100, len(CONTENT))),
    ("bytes=-7", 206, (len(CONTENT) - 7, len(CONTENT))),
    (f"bytes=0-{10**17}", 200, (0, len(CONTENT))),
    ("bytes=9-3", 200, (0, len(CONTENT))),
    ("bytes=0-1,5-6", 200, (0, len(CONTENT))),
    ("bytes=\u00b2-", 200, (0, len(CONTENT))),
    ("rows=1-2", 200, (0, len(CONTENT))),
]


@pytest.mark.parametrize(("asked", "status", "span"), RANGES)
async def test_ranges_are_exact(api, folder, run_id, asked, status, span):
    answer = await api.get(f"/v1/runs/{run_id}/export/model.safetensors", headers={"range": asked.encode("latin-1")})
    assert (answer.status_code, answer.content == CONTENT[slice(*span)]) == (status, True)
    if status == 206:
        assert answer.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/{len(CONTENT)}"


@pytest.mark.parametrize("asked", [f"bytes={len(CONTENT)}-", "bytes=99999999999-", "bytes=-0"])
async def test_a_range_behind_the_end_is_416(api, folder, run_id, asked):
    answer = await api.get(f"/v1/runs/{run_id}/export/model.safetensors", headers={"range": asked})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(CONTENT)}")
    assert answer.headers["content-type"] == "application/problem+json"


NAMES = [
    *("../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "%2fetc%2fpasswd", "a%00b", "", ".", "..%5csecret.txt"),
    *("x/../../secret.txt", "%2e%2e%2f%2e%2e%2f%2e%2e%2foutside.txt", "model.safetensors/", "m" * 3000),
]


@pytest.mark.parametrize("name", NAMES)
async def test_no_name_leads_out_of_the_folder(api, folder, run_id, name):
    for place in (f"checkpoints/{NAME}", "export", "checkpoints/..%2f", "checkpoints/%2e%2e"):
        answer = await api.get(f"/v1/runs/{run_id}/{place}/{name}")
        assert b"secret" not in answer.content.replace(b"secret.txt", b"")
        # The client itself shortens some of these paths, to that of a list.
        assert answer.status_code == 404 or answer.headers["content-type"] == "application/json"


async def test_links_and_special_files_are_refused(api, folder, run_id, tmp_path):
    export = folder / "export"
    (export / "link.txt").symlink_to(tmp_path / "outside.txt")
    (export / "folder").symlink_to(tmp_path)
    os.link(tmp_path / "outside.txt", tmp_path / "other.txt")
    os.mkfifo(export / "pipe")
    for name in ("link.txt", "folder/outside.txt", "pipe"):
        assert (await api.get(f"/v1/runs/{run_id}/export/{name}")).status_code == 404, name
    names = [file["name"] for file in (await api.get(f"/v1/runs/{run_id}/export")).json()["files"]]
    assert names == ["model.safetensors"]
    (folder / "export").rename(folder / "moved")
    (folder / "export").symlink_to(folder / "moved")
    assert (await api.get(f"/v1/runs/{run_id}/export/model.safetensors")).status_code == 404


async def test_every_file_is_closed(api, folder, run_id):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for name in ("model.safetensors", "none"):
            await api.get(f"/v1/runs/{run_id}/export/{name}", headers={"range": "bytes=1-2"})
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_files_come_from_the_store(api, redis, folder, run_id, store):
    at = configured_store() / run_id
    objects.put_file(at / "checkpoints" / NAME / "rank-0000.safetensors", folder / "export" / "model.safetensors")
    objects.put_bytes(at / "checkpoints" / NAME / "checkpoint.json", json.dumps(MANIFEST).encode())
    put_folder(at / "export", folder / "export")
    answer = await api.get(f"/v1/runs/{run_id}/checkpoints")
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["checkpoints"]
    assert found["step"] == 10
    [file] = (await api.get(f"/v1/runs/{run_id}/export")).json()["files"]
    assert (file["name"], file["sha256"]) == ("model.safetensors", DIGEST)
    answer = await api.get(f"/v1/runs/{run_id}/export/model.safetensors", headers={"range": "bytes=1048570-1048590"})
    assert (answer.status_code, answer.content) == (206, CONTENT[1048570:1048591])
    assert (await api.get(f"/v1/runs/{run_id}/export/none")).status_code == 404


def test_spans_of_an_empty_file():
    assert span_of(None, 0) == (0, 0)
    assert span_of("bytes=0-", 0) is None
