"""No two locked distributions own the same file, by the record that `make lock` writes beside each lock."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.images import inventory as tool
from deploy.images.owners import ALIKE, ENVIRONMENT, UNUSED, Inventory, above, collisions, inventory, shortened

LOCKS = Path(__file__).parents[2] / "deploy" / "locks"
NAMES = ("build", "cpu", "gpu")
STALE = "{lock}.owners.json: {name} is {found}, {wanted} is locked; `make lock` updates it"
FILES = st.sets(st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "b/a/a", "b/a/b", "{environment}/bin/a"]))


def hashes(name: str) -> dict[str, set[str]]:
    """The accepted SHA-256 of each distribution of a lock."""
    found: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in (LOCKS / f"{name}.lock").read_text().splitlines():
        if pinned := re.match(r"^(\S+==\S+) \\$", line):
            current = found[pinned[1]] = set()
        elif digest := re.match(r"^ +--hash=sha256:([0-9a-f]{64})", line):
            current.add(digest[1])
    return found


def recorded(name: str) -> Inventory:
    return Inventory.read(LOCKS / f"{name}.owners.json")


@pytest.mark.parametrize("name", NAMES)
def test_no_two_distributions_own_one_file(name: str) -> None:
    assert recorded(name).faults() == []


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_that_of_the_lock(name: str) -> None:
    wanted, found = hashes(name), recorded(name).distributions
    assert len(wanted) > 30
    for missing in wanted.keys() ^ found.keys():
        states = ("missing", "it") if missing in wanted else ("recorded", "nothing")
        pytest.fail(STALE.format(lock=name, name=missing, found=states[0], wanted=states[1]))
    other = {name: entry.archive for name, entry in found.items() if entry.sha256 not in wanted[name]}
    assert other == {}, f"`make lock` updates {name}.owners.json"
    assert [name for name, entry in found.items() if not entry.owns] == []


def test_each_harmless_file_has_several_owners_still() -> None:
    several = {path for name in NAMES for path in recorded(name).collisions()}
    assert several == ALIKE.keys() | UNUSED.keys()


def in_the_records_form(path: str) -> str:
    """A path of an installed distribution's own record, which is relative to site-packages."""
    inside = "lib/python3.11/site-packages"
    place = posixpath.normpath(f"{inside}/{path}")
    return place.removeprefix(f"{inside}/") if place.startswith(f"{inside}/") else ENVIRONMENT + place


@pytest.mark.skipif(sys.version_info[:2] != tool.PYTHON, reason="the images' Python is 3.11")
def test_what_is_installed_here_is_what_the_record_says() -> None:
    compared = 0
    for pinned, entry in recorded("cpu").distributions.items():
        name, _, version = pinned.partition("==")
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        compared += 1
        owned = set(entry.owns)
        paths = [in_the_records_form(str(file)) for file in installed.files or ()]
        own = [path for path in paths if not path.endswith(".pyc") and not path.startswith("__pycache__/")]
        unknown = [path for path in own if not owned.intersection((path, *above(path)))]
        assert unknown == [], pinned
    assert compared > 20


@given(st.fixed_dictionaries({"x": FILES, "y": FILES, "z": FILES}))
def test_the_short_form_loses_no_collision(files: dict[str, set[str]]) -> None:
    found = collisions(shortened(files))
    owners = {path: {name for name in files if path in files[name]} for path in set().union(*files.values())}
    for path, names in owners.items():
        if len(names) > 1:
            assert names <= set(found[path])
    # A file of one distribution may be a folder of another one.
    below = {
        (name, other)
        for name in files
        for path in files[name]
        for folder in above(path)
        for other in owners.get(folder.rstrip("/"), ())
    }
    assert bool(found) == any(len(names) > 1 for names in owners.values()) or any(one != two for one, two in below)
    if not found:
        assert all(one == two for one, two in below)


def test_the_short_form_names_the_outermost_folders() -> None:
    files = {"x": ["n/x/a.py", "n/x/b/c.py", "n/y.py", "x.py"], "y": ["n/z/a.py", "y/a.py"]}
    assert shortened(files) == {"x": ("n/x/", "n/y.py", "x.py"), "y": ("n/z/", "y/")}


def test_equal_contents_are_harmless_only_where_allowed() -> None:
    (namespace, *_) = ALIKE

    def faults(path: str, one: str, other: str) -> list[str]:
        return inventory({"x==1": ("x.whl", "0", {path: one}), "y==1": ("y.whl", "1", {path: other})}).faults()

    assert faults(namespace, "0-0", "0-0") == []
    assert faults(namespace, "0-0", "1-9") == [f"{namespace}: x==1 and y==1 own it, with different contents"]
    assert faults("other/__init__.py", "0-0", "0-0") == ["other/__init__.py: x==1 and y==1 own it"]


@pytest.mark.parametrize(
    ("name", "installed"),
    [
        ("x/a.py", "x/a.py"),
        ("x-1.data/purelib/x/a.py", "x/a.py"),
        ("x-1.data/platlib/x/a.so", "x/a.so"),
        ("x-1.data/scripts/run", "{environment}/bin/run"),
        ("x-1.data/data/share/doc/x", "{environment}/share/doc/x"),
        ("x-1.data/data/lib/python3.11/site-packages/x/a.py", "x/a.py"),
        ("x-1.data/headers/x.h", "{environment}/include/x/x.h"),
        ("x/y.data/scripts/run", "x/y.data/scripts/run"),
    ],
)
def test_a_wheels_file_has_its_installed_path(name: str, installed: str) -> None:
    assert tool.installed_path(name) == installed


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A wheel of version 1 with these files; returns its path."""
    path, stem = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    metadata = {
        f"{stem}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode(),
        f"{stem}/WHEEL": b"Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**files, **metadata}.items():
            archive.writestr(file, content)
    return path


def lock(folder: Path, *wheels: Path) -> Path:
    path = folder / "some.lock"
    digests = {file.name.split("-")[0]: hashlib.sha256(file.read_bytes()).hexdigest() for file in wheels}
    path.write_text("".join(f"{name}==1 \\\n    --hash=sha256:{digest}\n" for name, digest in digests.items()))
    return path


def test_the_tool_records_a_lock_and_names_collisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = b"[console_scripts]\nrun = one:main\n"
    one = wheel(tmp_path, "one", {"one/__init__.py": b"", "one-1.dist-info/entry_points.txt": program})
    two = wheel(tmp_path, "two", {"two/__init__.py": b"", "two/a.py": b"1"})
    three = wheel(tmp_path, "three", {"two/a.py": b"2", "three-1.data/scripts/run": b"#!/bin/sh\n"})
    sources = ["--no-index", "--find-links", str(tmp_path)]
    path = lock(tmp_path, one, two)
    assert tool.main([str(path), *sources]) == 0
    found = Inventory.read(tmp_path / "some.owners.json")
    assert found.distributions["one==1"].owns == ("one-1.dist-info/", "one/", "{environment}/")
    assert found.distributions["two==1"].archive == two.name
    assert tool.main([str(lock(tmp_path, one, two, three)), *sources]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "some.lock: two/a.py: three==1 and two==1 own it",
        "some.lock: {environment}/bin/run: one==1 and three==1 own it",
    ]


def test_the_tool_names_an_archive_that_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = wheel(tmp_path, "one", {"one/__init__.py": b""})
    one.write_bytes(b"no archive")
    assert tool.main([str(lock(tmp_path, one)), "--no-index", "--find-links", str(tmp_path)]) == 2
    assert "one-1-py3-none-any.whl" in capsys.readouterr().err
    assert not (tmp_path / "some.owners.json").exists()


class Ranges(BaseHTTPRequestHandler):
    """Serves one content by ranges, and counts the bytes that it sent."""

    content: ClassVar[bytes] = b""
    sent: ClassVar[list[int]] = []

    def log_message(self, *_: object) -> None:
        """Nothing: a test's output is its failures."""

    def do_HEAD(self) -> None:
        self._answer(200, b"", {"Accept-Ranges": "bytes", "Content-Length": str(len(self.content))})

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, self.content, {"Content-Length": str(len(self.content))})
            return
        first, last = int(asked[1]), min(int(asked[2]), len(self.content) - 1)
        part = self.content[first : last + 1]
        place = f"bytes {first}-{last}/{len(self.content)}"
        self._answer(206, part, {"Content-Range": place, "Content-Length": str(len(part))})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.sent.append(len(body))


@pytest.fixture
def served() -> Iterator[tuple[str, type[Ranges]]]:
    """An address, and the handler that answers there."""
    handler = type("Served", (Ranges,), {"sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/large-1-py3-none-any.whl", handler
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_only_the_end_of_a_large_wheel_is_read(served: tuple[str, type[Ranges]]) -> None:
    url, handler = served
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("large/a.bin", bytes(16 * 2**20))
        written.writestr("large-1.dist-info/entry_points.txt", "[console_scripts]\nlarge = large:main\n")
    handler.content = archive.getvalue()
    with tool.opened(url) as file, zipfile.ZipFile(file) as opened:
        files = tool.installed_files(opened)
    assert set(files) == {"large/a.bin", "large-1.dist-info/entry_points.txt", "{environment}/bin/large"}
    assert 0 < sum(handler.sent) < len(handler.content) / 8
