"""The rehearsal itself, with a stand-in cluster: it deletes what it created, names what is missing and what failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kind import commands, drills, run
from tests.kind.drills import DRILLS
from tests.kind.release import verdict
from tests.kind.shell import RehearsalError, Shell, until
from tests.kind.stand_in import StandIn

PROGRAMS = (*commands.PROGRAMS, "docker")


def programs(folder: Path, *names: str, text: str = "exit 0") -> dict[str, str]:
    """An environment in which only these programs exist."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[StandIn]:
    kind = type("Here", (StandIn,), {"faults": set(), "existing": ["others"]})
    monkeypatch.setattr(run, "Shell", kind)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    for name in ("READY_S", "STEPS_S", "RUN_S"):
        monkeypatch.setattr(f"tests.kind.release.{name}", 0.0)
    return kind


def rehearse(tmp_path: Path, **settings: str) -> int:
    return run.main({**programs(tmp_path / "bin", *PROGRAMS), **settings})


def test_everything_holds(stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()[-len(DRILLS) - 2 :]
    assert [line.split(":")[0] for line in lines] == [
        f"ok     {name}" for name in ("helm test", *(drill.name for drill in DRILLS), "uninstall")
    ]
    assert "succeeded, 20 of 20 steps, dispatched 80, trained 80" in lines[1]
    latest = stand_in.latest
    assert latest.clusters == ["others"]
    assert latest.cordoned == set()
    assert latest.seen[-1] == ["kind", "delete", "cluster", "--name", f"penstock-test-{os.getpid()}"]
    assert latest.environment["KUBECONFIG"] == str(tmp_path / "kubeconfig")
    uninstalled = latest.seen.index(commands.uninstall())
    assert [command[1] for command in latest.seen[uninstalled:] if command[0] in ("helm", "kind")] == [
        "uninstall",
        "delete",
    ]


@pytest.mark.parametrize(
    ("fault", "step", "said"),
    [
        ("helm test", "helm test", "a fault"),
        ("a lost group", "delete a rollout pod", "the counters do not reconcile"),
        ("penstock runs", "delete the head", "penstock runs --json` has exit status 1"),
        ("no budget", "drain the node of the volume", "evicted penstock-head, penstock-learner, penstock-redis"),
        ("a restart", "raise a bound by helm upgrade", "an upgrade of a bound ended penstock-rollout"),
        ("penstock events", "delete the learner's pod", "the event learner-restarted: not within"),
        ("helm uninstall", "uninstall", "a fault"),
    ],
)
def test_a_step_that_fails_is_named_and_the_rest_goes_on(
    stand_in: type[StandIn],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    step: str,
    said: str,
) -> None:
    stand_in.faults.add(fault)
    monkeypatch.setattr(drills, "READY_S", 0.0)
    shows_before_the_end(stand_in, monkeypatch)
    assert rehearse(tmp_path, KIND_LOGS=str(tmp_path / "logs")) == 1
    output = capsys.readouterr().out
    failed = re.findall(r"^FAILED (.+?): (.+)$", output, re.M)
    assert step in {name for name, _ in failed}
    assert any(name == step and said in text for name, text in failed)
    assert len(re.findall(r"^(?:ok     |FAILED )", output, re.M)) == len(DRILLS) + 2
    latest = stand_in.latest
    assert (
        commands.export_logs(f"penstock-test-{os.getpid()}", tmp_path / "logs" / step.replace(" ", "-")) in latest.seen
    )
    assert latest.clusters == ["others"]
    assert latest.cordoned == set()


def shows_before_the_end(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """A third look still finds the run in training: the drill that watches an upgrade looks once more."""
    view = stand_in._view
    seen: dict[int, int] = {}

    def later(self: StandIn, ended: bool) -> object:
        seen[len(self._runs)] = seen.get(len(self._runs), 0) + 1
        return view(self, ended=ended and seen[len(self._runs)] > 3)

    monkeypatch.setattr(stand_in, "_view", later)
    monkeypatch.setattr("tests.kind.release.RUN_S", 1.0)


@pytest.mark.parametrize("fault", ["make image-cpu", "create cluster", "kuberay-operator", "helm install penstock"])
def test_a_failed_preparation_leaves_no_cluster(
    stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    stand_in.faults.add(fault)
    assert rehearse(tmp_path) == 1
    assert fault in capsys.readouterr().out
    deleted = commands.delete_cluster(f"penstock-test-{os.getpid()}") in stand_in.latest.seen
    assert deleted == (fault != "make image-cpu")
    assert any("describe" in command for command in stand_in.latest.seen) == deleted
    assert stand_in.latest.clusters[:1] == ["others"]


def test_another_cluster_of_that_name_is_left_alone(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.existing = [f"penstock-test-{os.getpid()}"]
    assert rehearse(tmp_path) == 1
    assert stand_in.latest.clusters == stand_in.existing


def test_a_cluster_can_be_kept(stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path, KEEP="1") == 0
    assert stand_in.latest.clusters == ["others", f"penstock-test-{os.getpid()}"]
    assert f"kind delete cluster --name penstock-test-{os.getpid()}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("present", "settings", "said"),
    [
        ((), {}, "not on PATH: kind, kubectl, helm, make, docker or podman"),
        (("kubectl", "make", "podman"), {}, "not on PATH: kind, helm"),
        (PROGRAMS, {"ENGINE": "podman"}, "not on PATH: podman"),
        (PROGRAMS, {"ENGINE": "crio"}, "ENGINE: 'crio' is not valid: expected docker or podman"),
    ],
)
def test_missing_programs_are_named(
    present: tuple[str, ...], settings: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main({**programs(tmp_path / "bin", *present), **settings}) == 2
    assert capsys.readouterr().err == f"test-kind: {said}\n"


def test_a_signal_deletes_the_cluster(tmp_path: Path) -> None:
    log = tmp_path / "log"
    hanging = f'echo "$(basename "$0") $*" >>{log}\ncase "$*" in *create*) exec /bin/sleep 60;; esac'
    environment = programs(tmp_path / "bin", *PROGRAMS, text=hanging)
    environment["PATH"] += f":{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kind.run"],
        cwd=commands.ROOT,
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        # The engine's stand-in saves no file, which only the removal of the file after a load would miss.
        ends = time.monotonic() + 30
        while not log.exists() or "create" not in log.read_text():
            assert process.poll() is None
            assert time.monotonic() < ends, "the creation of a cluster"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(10)
    assert log.read_text().splitlines()[-1] == f"kind delete cluster --name penstock-test-{process.pid}"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is still listed does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_command_has_a_deadline_and_a_message(tmp_path: Path) -> None:
    shell = Shell(tmp_path, os.environ)
    assert shell.output(["cat"], 10, "text") == "text"
    with pytest.raises(RehearsalError, match=r"`sleep 60` did not end within 0\.1 s"):
        shell.follow(["sleep", "60"], 0.1)
    # The whole process group ends.
    pid = tmp_path / "pid"
    with pytest.raises(RehearsalError, match=r"did not end within 2 s"):
        shell.follow(["sh", "-c", f"sleep 60 & echo $! >{pid}; wait"], 2)
    assert pid.exists(), "the grandchild must have started"
    until("the end of a grandchild", 10, lambda: None if alive(int(pid.read_text())) else True, 0.05)
    with pytest.raises(RehearsalError, match=r"has exit status 3: why"):
        shell.output(["sh", "-c", "echo why >&2; exit 3"], 10)
    with pytest.raises(RehearsalError, match=r"`no-such-program` cannot be run"):
        shell.outcome(["no-such-program"], 10)


def test_a_wait_names_its_fact_and_the_last_failure() -> None:
    def look() -> None:
        raise RehearsalError("no answer")

    with pytest.raises(RehearsalError, match=r"the fact: not within 0 s; last: no answer"):
        until("the fact", 0.0, look, 0.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"state": "failed"}, "expected succeeded"),
        ({"groups": {"reconciled": False}}, "do not reconcile"),
        ({"groups": {"dead": 1}}, "expected no dead group"),
        ({"groups": {"trained": 0}}, "expected all steps and trained groups"),
        ({"rollout_steps": 19}, "expected all steps"),
    ],
)
def test_a_run_that_lost_something_is_a_failure(changes: dict[str, object], fault: str) -> None:
    view = StandIn(Path(), {})._view(ended=True)
    assert verdict(view).startswith("succeeded, 20 of 20 steps")
    groups = changes.get("groups", {})
    assert isinstance(groups, dict)
    changed = {**view, **changes, "groups": {**view["groups"], **groups}}
    with pytest.raises(RehearsalError, match=fault):
        verdict(changed)
