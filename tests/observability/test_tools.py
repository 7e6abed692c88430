"""Where Prometheus comes from: PATH, else the unpacked package; without either a reason is told, and nothing fails."""

from deploy.observability import tools


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_path_comes_before_the_unpacked_package(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "FOLDER", tmp_path / "tools")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert tools.find("promtool") is None
    unpacked = executable(tmp_path / "tools" / "usr" / "bin" / "promtool")
    assert tools.find("promtool") == unpacked
    on_path = executable(tmp_path / "bin" / "promtool")
    assert tools.find("promtool") == on_path


def test_without_apt_it_says_why_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["tools", str(tmp_path / "tools")])
    assert tools.main() == 0
    told = capsys.readouterr().err
    assert told == "tools: no prometheus and promtool (apt-get is not installed); tests that need them are skipped\n"


def test_an_apt_that_fails_is_quoted(tmp_path, monkeypatch, capsys):
    apt = executable(tmp_path / "apt-get")
    apt.write_text("#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["tools", str(tmp_path / "tools")])
    assert tools.main() == 0
    assert "(apt-get update: E: no network)" in capsys.readouterr().err
