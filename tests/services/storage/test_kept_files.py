"""A run's folder and its store keep the files that the run was submitted with; what differs is never used."""

import json

import pytest

from services.storage.errors import MissingObjectError, StoreError
from services.storage.kept_files import keep_files, read_kept_files
from services.storage.mirror import NO_MIRROR, run_mirror
from services.storage.removal import delete_run_files

FILES = {"./rewards.py": "def score(): ...\r\n# é", "./lib/words.txt": "", "./rubric.md": "Is it right?"}


def tree(folder):
    """All files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_holds_each_file_and_the_digests(tmp_path):
    assert keep_files(tmp_path, NO_MIRROR, FILES) == []
    kept = tree(tmp_path)
    digests = json.loads(kept.pop("rewards/digests.json"))["files"]
    assert {f"./{name.removeprefix('rewards/')}": content.decode() for name, content in kept.items()} == FILES
    assert [*digests] == sorted(FILES)
    assert read_kept_files(tmp_path, NO_MIRROR) == FILES


def test_keeping_again_writes_nothing(tmp_path):
    keep_files(tmp_path, NO_MIRROR, FILES)
    before = {name: (tmp_path / name).stat().st_ino for name in tree(tmp_path)}
    assert keep_files(tmp_path, NO_MIRROR, FILES) == []
    assert {name: (tmp_path / name).stat().st_ino for name in tree(tmp_path)} == before


@pytest.mark.parametrize("name", ["rewards.py", "digests.json"])
def test_a_changed_file_is_set_aside_and_reported(tmp_path, name):
    keep_files(tmp_path, NO_MIRROR, FILES)
    path = tmp_path / "rewards" / name
    path.write_text("# edited")
    [line] = keep_files(tmp_path, NO_MIRROR, FILES)
    [aside] = (tmp_path / "differs-rewards").iterdir()
    assert aside.name.startswith(f"{name}.")
    assert aside.read_text() == "# edited"
    assert line.startswith(f"{path}: is not the file that the run was submitted with (SHA-256 ")
    assert line.endswith(f"; it is now {aside}")
    assert read_kept_files(tmp_path, NO_MIRROR) == FILES
    assert keep_files(tmp_path, NO_MIRROR, FILES) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rewards.py", "# edited", "is not the file that the run was submitted with"),
        ("lib/words.txt", None, "missing"),
        ("digests.json", "{", "damaged"),
        ("digests.json", '{"files": {"./../secret": "0"}}', "names './../secret', which is outside of it"),
    ],
)
def test_a_changed_or_missing_file_is_never_read(tmp_path, name, text, expected):
    keep_files(tmp_path, NO_MIRROR, FILES)
    (tmp_path / "secret").write_text("")
    path = tmp_path / "rewards" / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(StoreError) as error:
        read_kept_files(tmp_path, NO_MIRROR)
    assert str(error.value).startswith(f"{path}: {expected}")


def test_a_run_without_files_has_none(tmp_path):
    assert read_kept_files(tmp_path, NO_MIRROR) == {}


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere.py", tmp_path / "run"
    elsewhere.write_text("# mine")
    (folder / "rewards").mkdir(parents=True)
    (folder / "rewards/rewards.py").symlink_to(elsewhere)
    keep_files(folder, NO_MIRROR, FILES)
    assert elsewhere.read_text() == "# mine"
    assert read_kept_files(folder, NO_MIRROR) == FILES


def test_the_store_holds_them_for_a_node_without_the_folder(store, tmp_path):
    mirror = run_mirror("run")
    assert keep_files(tmp_path / "run", mirror, FILES) == []
    assert keep_files(tmp_path / "other-node", mirror, FILES) == []
    assert sorted(mirror.listed()) == [
        "rewards/digests.json",
        "rewards/lib/words.txt",
        "rewards/rewards.py",
        "rewards/rubric.md",
    ]
    assert read_kept_files(tmp_path / "third-node", mirror) == FILES
    mirror.delete(["rewards/rubric.md"])
    with pytest.raises(MissingObjectError, match=r"^s3://.*/run/rewards/rubric.md: missing$"):
        read_kept_files(tmp_path / "third-node", mirror)
    delete_run_files(tmp_path, "run")
    assert mirror.listed() == {}


def test_a_changed_object_is_set_aside_and_reported(store, tmp_path):
    mirror = run_mirror("run")
    keep_files(tmp_path, mirror, FILES)
    mirror.put_bytes("rewards/rewards.py", b"# edited")
    with pytest.raises(StoreError, match=r"^s3://.*/run/rewards/rewards.py: is not the file"):
        read_kept_files(tmp_path / "other-node", mirror)
    [line] = keep_files(tmp_path, mirror, FILES)
    [aside] = mirror.listed("differs-rewards")
    assert mirror.read(aside) == b"# edited"
    assert line.startswith(f"{mirror.location('rewards/rewards.py', tmp_path)}: is not the file")
    assert line.endswith(f"; it is now {mirror.location(aside, tmp_path)}")
    assert read_kept_files(tmp_path / "other-node", mirror) == FILES
