"""The store, with a real S3 server: files are whole or absent, whichever process dies, and errors name their cause."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from services.storage import objects
from services.storage.errors import MissingObjectError, StoreError, StoreOutageError
from services.storage.facts import facts_of
from services.storage.folders import MANIFEST, contents, local_copy, marked, put_folder
from services.storage.mirror import NO_MIRROR, StoredMirror, run_mirror
from services.storage.places import StoreAddress, configured_store, parse_address
from services.storage.removal import delete_run_files
from tests.harness.servers.s3_server import KEY, SECRET, Partial, S3Server

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PAUSE_S", 0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder and a file of several parts."""
    made = tmp_path / "made"
    (made / "below").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "below/big b#é.bin").write_bytes(os.urandom(37 * MIB + 5))
    (made / "empty").write_bytes(b"")
    return made


def place() -> StoreAddress:
    address = configured_store()
    assert address is not None
    return address


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_a_store_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    mirror = run_mirror("run")
    assert mirror is NO_MIRROR
    assert (mirror.remote, mirror.listed(), mirror.fetch({"a": 1}, tmp_path)) == (False, {}, [])


@pytest.mark.parametrize("value", ["bucket/prefix", "s3://", "s3://UPPER/x", "gs://bucket/x", "s3:/bucket"])
def test_an_invalid_address_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", value)
    with pytest.raises(StoreError, match=r"^PENSTOCK_STORE: '.*' is not valid: expected s3://BUCKET/PREFIX$"):
        run_mirror("run")


def test_addresses() -> None:
    assert str(parse_address("s3://bucket", "f")) == "s3://bucket"
    assert str(parse_address("s3://bucket/a/b/", "f") / "run" / "x") == "s3://bucket/a/b/run/x"


def test_a_folder_is_fetched_as_it_was_put(store: S3Server, folder: Path, tmp_path: Path) -> None:
    at = place() / "export"
    put_folder(at, folder)
    copy = local_copy(str(at), "model.path", tmp_path / "cache")
    assert copy.name == "export"
    assert files_of(copy).keys() - {MANIFEST} == files_of(folder).keys()
    assert all(files_of(copy)[name] == content for name, content in files_of(folder).items())
    # A new folder replaces the old one completely, and is fetched beside it.
    (folder / "empty").unlink()
    (folder / "config.json").write_text("[]")
    put_folder(at, folder)
    again = local_copy(str(at), "model.path", tmp_path / "cache")
    assert files_of(again).keys() == {"config.json", "below/big b#é.bin", MANIFEST}
    assert (copy / "config.json").read_text() == "{}"
    assert list((tmp_path / "cache").glob(".*")) == []


def test_a_single_object_is_fetched_by_its_name(store: S3Server, tmp_path: Path) -> None:
    objects.put_bytes(place() / "data/questions.jsonl", b"{}\n")
    copy = local_copy(str(place() / "data/questions.jsonl"), "data.path", tmp_path)
    assert (copy.name, copy.read_bytes()) == ("questions.jsonl", b"{}\n")
    with pytest.raises(StoreError, match=r"^data\.path: 's3://.*/nothing' is not valid: expected .*, found none$"):
        local_copy(str(place() / "nothing"), "data.path", tmp_path)


def test_a_big_object_is_fetched_in_parts_where_supported(
    store: S3Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = folder / "below/big b#é.bin"
    run_mirror("run").put("big", big)
    with Partial(store.variables["AWS_ENDPOINT_URL"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        objects.get_file(place() / "run/big", big.stat().st_size, tmp_path / "back")
        assert server.parts == 3
        for difference in (-1, +1):
            with pytest.raises(StoreError, match="could not be read"):
                objects.get_file(place() / "run/none", big.stat().st_size + difference, tmp_path / "back-2")
    assert facts_of(tmp_path / "back") == facts_of(big)


def test_a_mark_pins_the_content_of_an_address(store: S3Server, tmp_path: Path) -> None:
    at = place() / "model"
    objects.put_bytes(at / "config.json", b"{}")
    named = marked(str(at), contents(at, "model.path"))
    assert named.startswith(f"{at}#")
    copy = local_copy(named, "model.path", tmp_path / "one")
    objects.put_bytes(at / "config.json", b"[]")
    # A node that has it keeps using it; another node gets no other content under the same name.
    assert local_copy(named, "model.path", tmp_path / "one") == copy
    with pytest.raises(StoreError, match=r"model\.path: s3://.* has changed since the run started"):
        local_copy(named, "model.path", tmp_path / "other")


def test_damaged_or_missing_files_are_not_fetched(store: S3Server, folder: Path, tmp_path: Path) -> None:
    at = place() / "export"
    put_folder(at, folder)
    big = store.object(f"{at.key}/below/big b#é.bin")
    content = bytearray(big.read_bytes())
    content[20 * MIB] ^= 1
    store.damaged(f"{at.key}/below/big b#é.bin", bytes(content))
    with pytest.raises(StoreError, match=r"big b#é\.bin: damaged \(its content does not match \.penstock\.json\)"):
        local_copy(str(at), "model.path", tmp_path / "cache")
    store.damaged(f"{at.key}/below/big b#é.bin", None)
    with pytest.raises(StoreError, match=r"big b#é\.bin: missing"):
        local_copy(str(at), "model.path", tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_content_that_changes_during_the_fetch_is_rejected(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, get = place() / "model", objects.get_file
    for name in ("config.json", "weights"):
        objects.put_bytes(at / name, b"{}")
    named = marked(str(at), contents(at, "model.path"))

    def and_change(part: StoreAddress, size: int, path: Path) -> None:
        get(part, size, path)
        objects.put_bytes(at / "weights", b"[]")

    monkeypatch.setattr(objects, "get_file", and_change)
    with pytest.raises(StoreError, match=r"^model\.path: s3://.*/model changed while it was fetched"):
        local_copy(named, "model.path", tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_the_next_fetch_replaces_one_that_was_killed(store: S3Server, folder: Path, tmp_path: Path) -> None:
    at, cache, run = place() / "model", tmp_path / "cache", tmp_path / "run"
    put_folder(at, folder)
    run_mirror("run").put("big", folder / "below/big b#é.bin")
    code = (
        "import sys, time; from pathlib import Path; from services.storage import folders, mirror, objects\n"
        "def half(at, size, path):\n"
        "    path.write_bytes(b'half'); print(path, flush=True); time.sleep(30)\n"
        "objects.get_file = half\n"
    )
    size = (folder / "below/big b#é.bin").stat().st_size
    fetches = [
        f"folders.local_copy({str(at)!r}, 'model.path', Path({str(cache)!r}))",
        f"mirror.run_mirror('run').fetch({{'big': {size}}}, Path({str(run)!r}))",
    ]
    for fetch in fetches * 2:
        fetching = subprocess.Popen([sys.executable, "-c", code + fetch], stdout=subprocess.PIPE, env=os.environ)
        try:
            assert fetching.stdout is not None
            assert b"/." in fetching.stdout.readline()
        finally:
            fetching.kill()
            fetching.communicate(timeout=10)
    left = [path for top in (cache, run) for path in top.iterdir() if path.suffix != ".lock"]
    assert len(left) == 2, "one partial copy per kind stays, however many kills"
    assert files_of(local_copy(str(at), "model.path", cache)).keys() - {MANIFEST} == files_of(folder).keys()
    assert run_mirror("run").fetch({"big": size}, run) == ["big"]
    assert [path.name[:3] for path in cache.iterdir()] == ["s3-"]
    assert [path.name for path in run.iterdir()] == ["big"]


def test_the_second_fetch_keeps_the_folder_of_the_first(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the lock did not span machines."""
    at, get = place() / "model", objects.get_file
    objects.put_bytes(at / "config.json", b"{}")
    first = local_copy(str(at), "model.path", tmp_path / "first").parent

    def and_another(part: StoreAddress, size: int, path: Path) -> None:
        get(part, size, path)
        (tmp_path / "second" / first.name).symlink_to(first)

    monkeypatch.setattr(objects, "get_file", and_another)
    copy = local_copy(str(at), "model.path", tmp_path / "second")
    assert copy.resolve().parent == first
    assert list((tmp_path / "second").glob(".*")) == []


def test_a_killed_upload_leaves_no_usable_folder(store: S3Server, folder: Path, tmp_path: Path) -> None:
    at = place() / "export"
    code = (
        "import sys, time; from pathlib import Path; from services.storage import objects, folders\n"
        "put = objects.put_file\n"
        "def slow(at, path, stop=None):\n"
        "    put(at, path, stop); print(path, flush=True); time.sleep(30)\n"
        "objects.put_file = slow\n"
        f"folders.put_folder(folders.parse_address({str(at)!r}, 'x'), Path({str(folder)!r}))"
    )
    uploading = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ)
    try:
        assert uploading.stdout is not None
        uploading.stdout.readline()
    finally:
        uploading.send_signal(signal.SIGKILL)
        uploading.communicate(timeout=10)
    assert contents(at, "x"), "part of the folder is there"
    with pytest.raises(StoreError, match=r"export: incomplete: its upload has not finished"):
        local_copy(str(at), "model.path", tmp_path / "cache")


def test_many_processes_fetch_an_address_once(store: S3Server, folder: Path, tmp_path: Path) -> None:
    put_folder(place() / "model", folder)
    code = (
        "from pathlib import Path; from services.storage import objects\n"
        "from services.storage.folders import local_copy\n"
        "get, got = objects.get_file, []\n"
        "objects.get_file = lambda *a: (got.append(a), get(*a))\n"
        f"print(local_copy({str(place() / 'model')!r}, 'model.path', Path({str(tmp_path / 'cache')!r})), len(got))"
    )
    temporary = [tmp_path / f"tmp-{number}" for number in range(4)]
    for directory in temporary:
        directory.mkdir()  # each pod has its own, even if pods share the cache
    fetching = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(directory)}
        )
        for directory in temporary
    ]
    ends = time.monotonic() + 30
    try:
        answers = [process.communicate(timeout=max(0.0, ends - time.monotonic()))[0].split() for process in fetching]
    finally:
        for process in fetching:
            process.kill()
            process.communicate(timeout=30)
    assert len({folder for folder, _ in answers}) == 1
    assert sorted(int(count) for _, count in answers) == [0, 0, 0, 4]
    assert all(files_of(Path(answers[0][0]))[name] == content for name, content in files_of(folder).items())


@pytest.mark.parametrize(
    ("status", "code", "passes"),
    [
        ("400 Bad Request", "RequestTimeout", True),
        ("400 Bad Request", "RequestTimeTooSkewed", False),
        ("400 Bad Request", "InvalidRequest", False),
        ("503 Slow Down", "SlowDown", True),
    ],
)
def test_transient_errors_differ_from_rejections(status: str, code: str, passes: bool) -> None:
    from obstore.exceptions import GenericError

    text = f"Generic S3 error: Error performing PUT http://h/b - Server returned non-2xx status code: {status}: "
    fault = objects._translated("it", GenericError(f"{text}<Error><Code>{code}</Code><Message>why</Message></Error>"))
    assert isinstance(fault, StoreError)
    assert isinstance(fault, StoreOutageError) is passes
    assert f"({code}: why)" in str(fault)


def test_errors_name_no_credentials(store: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.variables["AWS_ENDPOINT_URL"].replace("//", "//user:hidden@"))
    mirror = run_mirror("run")
    for request in (mirror.listed, lambda: mirror.read("run.json"), lambda: mirror.put_bytes("x", b"")):
        with pytest.raises(StoreError) as raised:
            request()
        text = str(raised.value)
        assert not isinstance(raised.value, StoreOutageError), "a retry does not help"
        for part in (str(place()), "http://127.0.0.1:", "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"):
            assert part in text
        for secret in ("another-secret", SECRET, KEY, "hidden"):
            assert secret not in text
    assert str(pickle.loads(pickle.dumps(raised.value))) == text  # noqa: S301 - Ray pickles errors


def test_a_missing_bucket_is_named(store: S3Server) -> None:
    mirror = StoredMirror(StoreAddress("no-such-bucket", "x"))
    for request in (mirror.listed, lambda: mirror.put_bytes("x", b"")):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/x.*no such bucket at http://127") as raised:
            request()
        assert not isinstance(raised.value, StoreOutageError | MissingObjectError)


class Killing:
    """A stop flag that an upload checks before each part; the second check kills the server."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.checks = 0

    def is_set(self) -> bool:
        self.checks += 1
        if self.checks == 2:
            self._server.kill()
        return False


def test_a_killed_server_is_an_error_until_it_is_back(own_store: S3Server, folder: Path, tmp_path: Path) -> None:
    mirror, big = run_mirror("run"), folder / "below/big b#é.bin"
    mirror.put("big-0", big)
    with pytest.raises(StoreOutageError, match=r"s3://.* could not be written: http://127.* did not respond"):
        mirror.put("big-1", big, cast("threading.Event", Killing(own_store)))
    began = time.monotonic()
    with pytest.raises(StoreOutageError):
        mirror.listed()
    assert time.monotonic() - began < 30
    own_store.start()
    assert mirror.listed() == {"big-0": big.stat().st_size}, "a file is whole or absent"
    mirror.put("big-again", big)
    mirror.fetch({"big-again": big.stat().st_size}, tmp_path / "back")
    assert facts_of(tmp_path / "back/big-again") == facts_of(big)


def test_a_server_that_hangs_is_an_error_in_time(
    own_store: S3Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "REQUEST_S", 1)
    monkeypatch.setattr(objects, "ATTEMPTS", 1)
    objects._connected.cache_clear()
    mirror = run_mirror("run")
    mirror.put("config.json", folder / "config.json")
    own_store.hang()
    try:
        for request in (mirror.listed, lambda: mirror.put("big", folder / "below/big b#é.bin")):
            began = time.monotonic()
            with pytest.raises(StoreOutageError, match="did not respond as expected"):
                request()
            assert time.monotonic() - began < 20
    finally:
        own_store.resume()
        objects._connected.cache_clear()
    assert mirror.listed() == {"config.json": 2}


def test_an_upload_is_cancelled_when_its_process_stops(store: S3Server, folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(objects.UploadCancelledError):
        run_mirror("run").put("big", folder / "below/big b#é.bin", stop)
    assert run_mirror("run").listed() == {}
    with pytest.raises(FileNotFoundError) as raised:
        run_mirror("run").put("gone", folder / "gone")
    assert not isinstance(raised.value, StoreError)


def test_files_are_listed_fetched_and_deleted_by_name(store: S3Server, folder: Path, tmp_path: Path) -> None:
    mirror = run_mirror("run")
    for name in ("batches/a.json", "batches/b.json", "records/a.json"):
        mirror.put(name, folder / "config.json")
    run_mirror("run-2").put("batches/c.json", folder / "config.json")
    assert mirror.listed("batches") == {"batches/a.json": 2, "batches/b.json": 2}
    assert mirror.fetch(mirror.listed(), tmp_path / "run") == ["batches/a.json", "batches/b.json", "records/a.json"]
    assert mirror.fetch(mirror.listed(), tmp_path / "run") == []
    with pytest.raises(MissingObjectError):
        mirror.read("batches/none")
    mirror.delete(["batches/a.json", "batches/none"])
    assert list(mirror.listed()) == ["batches/b.json", "records/a.json"]
    assert mirror.location("export", tmp_path) == f"{place()}/run/export"


def test_a_run_s_files_are_deleted_and_no_other_s(store: S3Server, folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for run in ("run", "run-2", "ru"):
        (runs / run).mkdir(parents=True)
        run_mirror(run).put("records/a", folder / "config.json")
    (runs / "run/inside").symlink_to(folder)
    (runs / "linked").symlink_to(folder)
    before = files_of(folder)
    for _ in range(2):
        delete_run_files(runs, "run")
        delete_run_files(runs, "linked")
    assert sorted(path.name for path in runs.iterdir()) == ["ru", "run-2"]
    assert [list(run_mirror(run).listed()) for run in ("run", "run-2", "ru")] == [[], ["records/a"], ["records/a"]]
    assert files_of(folder) == before, "what a link names is not the run's"
