"""Programs come from PATH, else from the unpacked package; without either, the message names the package."""

import pytest

from tests.harness import programs


def executable(path, text="#!/bin/sh\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An empty PATH, and a folder for packages."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("sys.argv", ["programs", str(tmp_path / "tools")])
    return tmp_path


@pytest.mark.parametrize("place", ["usr/bin", "bin"])
def test_path_comes_before_the_unpacked_package(bare, place):
    assert programs.find("promtool", bare / "tools") is None
    unpacked = executable(bare / "tools" / "prometheus" / place / "promtool")
    assert programs.find("promtool", bare / "tools") == unpacked
    on_path = executable(bare / "bin" / "promtool")
    assert programs.find("promtool", bare / "tools") == on_path


def test_the_message_for_a_missing_program_names_its_package(bare, monkeypatch):
    monkeypatch.setattr(programs, "FOLDER", bare / "tools")
    with pytest.raises(
        pytest.skip.Exception, match=r"busybox is not on PATH: apt-get install busybox-static, or `make"
    ):
        programs.needed("busybox")
    with pytest.raises(AssertionError, match=r"redis-cli is not on PATH: apt-get install redis-tools$"):
        programs.demanded("redis-cli")


def test_without_apt_one_line_per_package_has_the_reason(bare, capsys):
    assert programs.main() == 0
    assert capsys.readouterr().err.splitlines() == [
        "tools: no bwrap: install Debian's bubblewrap (apt-get is not installed); tests that need it are skipped",
        "tools: no busybox: install Debian's busybox-static (apt-get is not installed); tests that need it are skipped",
        "tools: no prometheus and promtool: install Debian's prometheus (apt-get is not installed);"
        " tests that need it are skipped",
    ]


def test_an_apt_that_fails_is_quoted(bare, capsys):
    executable(bare / "bin" / "apt-get", "#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    assert programs.main() == 0
    assert "(apt-get update: E: no network)" in capsys.readouterr().err


def test_an_existing_program_is_not_downloaded_again(bare, capsys):
    executable(bare / "bin" / "apt-get", f"#!/bin/sh\necho called >> {bare}/called\nexit 100\n")
    for program in ("busybox", "bwrap"):
        executable(bare / "bin" / program)
    for program in ("prometheus", "promtool"):
        executable(bare / "tools" / "prometheus" / "usr" / "bin" / program)
    assert programs.main() == 0
    assert capsys.readouterr().err == ""
    assert not (bare / "called").exists()


def test_a_truncated_package_is_not_taken_as_complete(bare, capsys):
    executable(bare / "bin" / "apt-get", '#!/bin/sh\nfor last; do :; done\n: > "${last}_1_all.deb"\n')
    unpacking = 'mkdir -p "$3/usr/bin"\n: > "$3/usr/bin/busybox"\n: > "$3/usr/bin/promtool"\n'
    dpkg = executable(
        bare / "bin" / "dpkg-deb", f"#!/bin/sh\nPATH=/usr/bin:/bin\n{unpacking}echo 'E: cut' >&2\nexit 1\n"
    )
    assert programs.main() == 0
    assert capsys.readouterr().err.count("E: cut") == len({programs.PACKAGES[name] for name in programs.FETCHED})
    assert list((bare / "tools").iterdir()) == []
    executable(dpkg, f"#!/bin/sh\nPATH=/usr/bin:/bin\n{unpacking}")
    assert programs.main() == 0
    assert programs.find("busybox", bare / "tools") == bare / "tools/busybox-static/usr/bin/busybox"
