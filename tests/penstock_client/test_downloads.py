"""Owns the tests of downloads: whole files, below the folder that was named, or none.

Must not start a gateway.
"""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from penstock_client.client import Client
from tests.deploy.command_line import penstock
from tests.penstock_client.other_servers import Respond, answer, other_server

CONTENT = "weights" * 1000
DIGEST = hashlib.sha256(CONTENT.encode()).hexdigest()


def exporting(name: str, content: str = CONTENT, digest: str | None = DIGEST) -> Respond:
    """An API whose run has an export of this one file."""
    listed = {"place": "/runs/r/export", "files": [{"name": name, "size": len(CONTENT), "sha256": digest}]}

    def respond(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/v1/runs/r/export":
            answer(200, "application/json", json.dumps(listed))(request)
        else:
            answer(200, "application/octet-stream", content)(request)

    return respond


def test_an_export_is_downloaded_once(tmp_path: Path) -> None:
    with other_server(exporting("nested/model.safetensors")) as server:
        given = ["export", "r", "--output", str(tmp_path / "out"), "--api", server.url]
        status, output = penstock(*given)
        assert (status, output.split()) == (0, ["downloaded", "0.0", "MiB", "nested/model.safetensors"])
        assert (tmp_path / "out/nested/model.safetensors").read_text() == CONTENT
        status, output = penstock(*given)
        assert (status, output.split()[:2]) == (0, ["is", "there"])
        assert [path for _, path, _ in server.requests].count("/v1/runs/r/export/nested/model.safetensors") == 1


def test_downloads_are_a_document_too(tmp_path: Path) -> None:
    with other_server(exporting("model.bin")) as server:
        given = ["export", "r", "--output", str(tmp_path), "--json", "--api", server.url]
        file = {"name": "model.bin", "size": len(CONTENT), "sha256": DIGEST}
        for fresh in (True, False):
            status, output = penstock(*given)
            assert status == 0
            assert json.loads(output) == {"folder": str(tmp_path), "files": [{**file, "downloaded": fresh}]}


def test_a_download_tells_how_far_it_is(tmp_path: Path) -> None:
    sizes: list[int] = []
    with other_server(exporting("model.bin")) as server, Client(server.url, token="t") as client:
        [file] = client.exported("r").files
        assert client.download_export("r", file, tmp_path, sizes.append)
    assert sum(sizes) == len(CONTENT)


@pytest.mark.parametrize(
    ("content", "digest"), [(CONTENT[:-1], None), (CONTENT[:-1] + "x", DIGEST), (CONTENT + "more", None)]
)
def test_what_is_not_whole_is_not_kept(tmp_path: Path, content: str, digest: str | None) -> None:
    with other_server(exporting("model.bin", content, digest)) as server:
        status, output = penstock("export", "r", "--output", str(tmp_path), "--api", server.url)
    assert (status, "is not what the API lists" in output, list(tmp_path.iterdir())) == (2, True, [])


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "", "a\\\\..\\\\b", "nul\0"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with other_server(exporting(name)) as server:
        status, output = penstock("export", "r", "--output", str(tmp_path / "in"), "--api", server.url)
    assert (status, "the name of a file is not valid" in output) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with other_server(exporting("model.bin")) as server:
        status, output = penstock("export", "r", "--output", str(tmp_path / "file"), "--api", server.url)
    assert (status, "--output: " in output, output.count("\n")) == (2, True, 1)
