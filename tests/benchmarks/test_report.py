"""The form of the benchmarks' results: figures, targets, exit status, files; and the command that runs a benchmark."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS, listing, main
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.machine import machine
from benchmarks.report.picture import Panel, Series, draw
from benchmarks.report.report import Report, options, positive

ROOT = Path(__file__).parents[2]
LINE = Panel("rate", "groups", "groups/s", (Series("ours", (1.0, 2.0), (3.0, 4.0)), Series("raw", (1.0,), (5.0,))))


def report(*figures: Figure) -> Report:
    return Report("example", list(figures), [LINE], {"more": 1}, ["One sentence."])


def test_axes_of_plots_start_at_zero_or_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small difference of large values must not look large."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    values = {"alike": (98.0, 99.0), "negative": (-1.0, 2.0)}
    panels = [Panel(title, "x", "y", (Series("ours", (1.0, 2.0), y),)) for title, y in values.items()]
    draw("example", [*panels, replace(panels[0], title="logarithmic", log="y")], tmp_path / "example.png")
    figure = pyplot.gcf()
    monkeypatch.undo()
    bottoms = {axis.get_title(): axis.get_ylim()[0] for axis in figure.axes}
    pyplot.close(figure)
    assert bottoms["alike"] == 0.0
    assert bottoms["negative"] <= -1.0
    assert bottoms["logarithmic"] > 0.0


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target(least=0.9), 0.9, True),
        (Target(least=0.9), 0.89, False),
        (Target(most=0.5), 0.5, True),
        (Target(most=0.5), 0.51, False),
        (Target(1.0, 2.0), 1.5, True),
        (Target(1.0, 2.0), 2.5, False),
    ],
)
def test_a_target_has_bounds(target: Target, value: float, met: bool) -> None:
    assert target.met(value) is met
    assert Figure("f", (value,), target=target).missed is not met


def test_a_ratio_pairs_the_repeats() -> None:
    found = ratio("speed", [2.0, 9.0, 4.0], [1.0, 3.0, 8.0], Target(least=2.5))
    assert found.values == (2.0, 3.0, 0.5)
    assert found.median == 2.0
    assert found.missed
    assert found.row() == {
        "name": "speed",
        "unit": "",
        "values": [2.0, 3.0, 0.5],
        "min": 0.5,
        "median": 2.0,
        "max": 3.0,
        "target": ">= 2.5",
        "met": False,
    }
    with pytest.raises(ValueError, match=r"shorter|longer"):
        ratio("speed", [1.0], [1.0, 2.0])


def test_a_figure_needs_a_value() -> None:
    with pytest.raises(ValueError, match="'empty': no values"):
        Figure("empty", ())


def test_a_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = report(Figure("wait", (0.25, 0.5), "s", Target(most=0.5)), Figure("rate", (1234.5,))).finish(tmp_path)
    assert status == 0
    printed = capsys.readouterr().out
    assert "| wait (s) | 0.25 | 0.375 | 0.5 | <= 0.5: met |" in printed
    assert "| rate | 1,234 | 1,234 | 1,234 |  |" in printed
    assert "One sentence." in printed
    document = json.loads((tmp_path / "example.json").read_text())
    assert document["figures"][0]["values"] == [0.25, 0.5]
    assert document["details"] == {"more": 1}
    assert document["machine"]["cores"] >= 1
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")


def test_a_missed_target_is_named_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(Figure("wait", (0.6,), "s", Target(most=0.5))).finish(tmp_path) == 1
    assert "MISSED: wait" in capsys.readouterr().out


def test_the_machine_names_its_capped_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found = machine()
    assert found["capped by"]["ATEN_CPU_CAPABILITY"] == "avx2"
    assert set(found) == {"processor", "cores", "vectors", "capped by", "load", "commit"}


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_repeats_are_whole_and_positive(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number of at least 1"):
        positive(text)
    assert positive("3") == 3
    assert options("example", "How.").parse_args(["--repeats", "2"]).repeats == 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_explains_its_method(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(BENCHMARKS[name].module).main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: penstock bench {name}")
    assert "--repeats" in printed
    assert "--out" in printed
    assert name in listing()


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope"]) == 2
    assert "'nope' is not a benchmark: expected one of" in capsys.readouterr().err


def test_the_command_runs_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli.main", "bench"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == listing().strip()
    refused = subprocess.run([*command, "nope"], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert refused.returncode == 2


def test_a_benchmark_that_is_ended_leaves_nothing_running(tmp_path: Path) -> None:
    given = ["data-plane", "--parts", "pending", "--pending", "100", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", *given], cwd=ROOT)
    started: list[psutil.Process] = []
    try:
        ends = time.monotonic() + 60
        while len(started) < 4:  # Valkey, the sampler, and the stubs of rollout and verifier
            assert time.monotonic() < ends
            assert process.poll() is None
            started = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert psutil.wait_procs(started, 30)[1] == []
    finally:
        process.kill()
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
