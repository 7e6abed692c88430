"""How a file that a recipe names is opened: no link, pipe or device, even if it is exchanged after the check."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from services.storage.errors import StoreError
from services.storage.models import local_data, local_model, local_text
from services.storage.roots import opening
from services.storage.roots.allowed import load_roots
from services.storage.roots.opening import existence_fault, open_named, place_of, read_text

FIELD = "model.chat_template"
SECRET = "TOP-SECRET"

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only root; a secret is beside it."""
    folder = tmp_path / "shared"
    (folder / "data").mkdir(parents=True)
    (folder / "data/rows.jsonl").write_text("rows")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/rows.jsonl").write_text(SECRET)
    monkeypatch.setenv("PENSTOCK_ROOTS", str(folder))
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    return folder


def refused(read: Callable[[str, str], object], path: Path | str) -> str:
    with pytest.raises(StoreError) as error:
        read(str(path), FIELD)
    assert SECRET not in str(error.value)
    return str(error.value).removeprefix(f"{FIELD}: {str(path)[:200]!r} is not valid: expected ")


def test_a_text_is_read(root: Path) -> None:
    (root / "link").symlink_to("data/rows.jsonl")
    assert read_text(f"{root}/data/rows.jsonl", FIELD) == read_text(f"{root}/link", FIELD) == "rows"
    assert local_text("./chat.jinja", FIELD, {"./chat.jinja": "text"}) == "text"


@pytest.mark.parametrize("text", ["/etc/passwd", "/proc/self/environ", "/dev/zero", "{root}/../secret/rows.jsonl"])
@pytest.mark.parametrize("read", [read_text, place_of, local_data])
def test_what_is_outside_is_not_read(root: Path, text: str, read: Callable[[str, str], object]) -> None:
    assert refused(read, text.replace("{root}", str(root))).startswith("a path ")


def test_a_link_out_of_the_roots_is_not_read(root: Path, tmp_path: Path) -> None:
    (root / "file").symlink_to(tmp_path / "secret/rows.jsonl")
    (root / "folder").symlink_to(tmp_path / "secret")
    for path in (root / "file", root / "folder/rows.jsonl"):
        assert refused(read_text, path).startswith("a path below one of")


@pytest.mark.parametrize("exchanged", ["rows.jsonl", "data"])
def test_a_link_made_after_the_check_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: str
) -> None:
    checked = opening.place_of

    def exchange(text: str, field: str) -> Path:
        place = checked(text, field)
        if exchanged == "data":
            (root / "data").rename(root / "aside")
            (root / "data").symlink_to(tmp_path / "secret")
        else:
            place.unlink()
            place.symlink_to(tmp_path / "secret/rows.jsonl")
        return place

    monkeypatch.setattr(opening, "place_of", exchange)
    fault = refused(read_text, root / "data/rows.jsonl")
    expected = {
        "data": "a readable file (Not a directory)",
        "rows.jsonl": "a regular file; it is a link, made while it was opened",
    }
    assert fault == expected[exchanged]


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(("make", "kind"), [(_pipe, "a pipe"), (_socket, "a socket")])
def test_what_is_no_file_is_refused_without_waiting(
    open_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], kind: str
) -> None:
    monkeypatch.setenv("PENSTOCK_ROOTS", str(open_path))
    make(open_path / "it")
    assert refused(read_text, open_path / "it") == f"a file or a folder; it is {kind}"
    assert refused(local_data, open_path).endswith(f"a folder of files and folders; 'it' is {kind}")
    assert existence_fault(open_path / "it", load_roots(), folder=False) == f"a file; it is {kind}"


def test_a_pipe_made_after_the_check_does_not_block(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = root / "data/rows.jsonl"
    place.unlink()
    os.mkfifo(place)
    monkeypatch.setattr(opening, "place_of", lambda text, field: Path(text))
    assert refused(lambda text, field: open_named(Path(text), field), place) == "a regular file; it is a pipe"


def test_a_folder_with_a_link_out_is_refused(root: Path, tmp_path: Path) -> None:
    model = root / "model"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").symlink_to(root / "data/rows.jsonl")
    assert local_model(str(model), tmp_path) == model
    (model / "sub/tokenizer.json").symlink_to(tmp_path / "secret/rows.jsonl")
    fault = refused(lambda text, _: local_model(text, tmp_path), model)
    assert fault.endswith("; 'sub/tokenizer.json' is one")


def test_a_large_file_is_not_read_whole(root: Path) -> None:
    with (root / "large").open("wb") as file:
        file.truncate(2**40)
    assert refused(read_text, root / "large") == "a file of at most 262144 bytes"


def test_errors_name_the_place_of_a_fault_only(root: Path) -> None:
    (root / "latin").write_bytes(f"{SECRET} caf\xe9".encode("latin-1"))
    assert refused(read_text, root / "latin") == "a file in UTF-8 (byte 15 is not)"
    assert refused(read_text, root / "none") == "a readable file (No such file or directory)"
    assert refused(read_text, root / "data") == "a regular file; it is a folder"
    assert refused(read_text, f"{root}/{'n' * 300}") == "a readable file (File name too long)"


def test_only_what_this_machine_sees_is_missed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = load_roots()
    assert existence_fault(root / "data", roots, folder=None) == ""
    assert existence_fault(root / "data", roots, folder=False) == "a file; it is a folder"
    assert existence_fault(root / "none", roots, folder=True) == "a folder that exists"
    assert existence_fault(root / ("n" * 300), roots, folder=None) == "a file or a folder that exists"
    monkeypatch.setenv("PENSTOCK_ROOTS", "/of-a-node")
    assert existence_fault(Path("/of-a-node/model"), load_roots(), folder=True) == ""
