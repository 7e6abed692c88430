"""Owns a stand-in of the Hugging Face Hub: the requests that huggingface_hub makes, over repositories that tests fill.

Must not replace any code under test. Tests move branches, close repositories, and break answers and transfers.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

TOKEN, STRANGER = "hf_test_token_that_is_never_shown", "hf_test_token_without_access"
LARGE = 1024
"""Files above this size are large files: the answer for them is a redirect to another host."""


@dataclass
class Repository:
    """`commits`: files by name, by commit. `gated`: its files need TOKEN; `private`: all of it does."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Move a branch to a new commit with these files; returns its hash."""
        content = [(name, hashlib.sha1(files[name]).hexdigest()) for name in sorted(files)]
        commit = hashlib.sha1(f"{len(self.commits)} {content}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


@dataclass
class HubServer:
    """`statuses`: what the next requests to the hub get instead of an answer. As a context manager it runs inside.

    `cuts`: after how many bytes the next transfers of large files are cut. `replaced`: wrong content by large file.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    replaced: dict[bytes, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    on_listing: Callable[[], None] = lambda: None
    on_transfer: Callable[[], None] = lambda: None
    port: int = 0

    def __enter__(self) -> Self:
        handler = type("_Bound", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def model(self, name: str, files: dict[str, bytes]) -> Repository:
        """A new model repository with these files on its branch main."""
        return self._added(name, files)

    def dataset(self, name: str, files: dict[str, bytes]) -> Repository:
        """A new data set repository with these files on its branch main."""
        return self._added(f"datasets/{name}", files)

    def _added(self, name: str, files: dict[str, bytes]) -> Repository:
        repository = self.repositories[name] = Repository()
        repository.commit(files)
        return repository

    def transfers(self) -> list[str]:
        """The requests for content so far."""
        return [request for request in self.requests if request.startswith("GET") and "/api/" not in request]


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, for a commit."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Tests read the list of requests instead."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        if path.startswith("cdn/"):
            if self.headers.get("Authorization"):
                self.hub.leaked.append(path)
            self._send_large(path.removeprefix("cdn/"))
        elif self.hub.statuses:
            self._send(self.hub.statuses.pop(0), b"not now")
        elif path.startswith("api/"):
            self._api(path.removeprefix("api/"))
        else:
            self._resolve(path)

    def _repository(self, name: str, *, content: bool) -> Repository | None:
        repository = self.hub.repositories.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.private and given != TOKEN):
            self._fail(401 if not given else 404, "RepoNotFound")
        elif content and repository.gated and given != TOKEN:
            self._fail(403 if given else 401, "GatedRepo")
        else:
            return repository
        return None

    def _files(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._fail(404, "RevisionNotFound")
            return None
        return commit, repository.commits[commit]

    def _api(self, path: str) -> None:
        kind, org, name, what, revision = path.split("/", 4)
        repository = self._repository(f"{'datasets/' if kind == 'datasets' else ''}{org}/{name}", content=False)
        if repository is None or (found := self._files(repository, revision)) is None:
            return
        commit, files = found
        if what == "revision":
            self._send_json({"id": f"{org}/{name}", "sha": commit, "siblings": [], "tags": [], "downloads": 0})
        else:
            self.hub.on_listing()
            self._send_json([_entry(name, content) for name, content in files.items()])

    def _resolve(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        repository = self._repository(name, content=True)
        if repository is None:
            return
        revision, _, file = rest.partition("/")
        if (found := self._files(repository, revision)) is None:
            return
        commit, files = found
        if file not in files:
            self._fail(404, "EntryNotFound")
            return
        content, digest = files[file], hashlib.sha256(files[file]).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_digest(content)}"'}
        if len(content) <= LARGE:
            self._send(200, content, headers)
            return
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        place = f"http://localhost:{self.hub.port}/cdn/{digest}?X-Amz-Signature=signature-that-is-never-shown"
        self._send(302, b"", headers | {"Location": place})

    def _send_large(self, digest: str) -> None:
        commits = [files for repository in self.hub.repositories.values() for files in repository.commits.values()]
        known = {hashlib.sha256(content).hexdigest(): content for files in commits for content in files.values()}
        content = known[digest]
        content = self.hub.replaced.get(content, content)
        self.hub.on_transfer()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        cut = self.hub.cuts.pop(0) if self.hub.cuts and self.command == "GET" else None
        self._send(206 if start else 200, content[start:], headers, cut)

    def _send_json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": _git_digest(content)}
    if len(content) > LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry |= {"oid": _git_digest(digest.encode())}
        entry |= {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}}
    return entry
