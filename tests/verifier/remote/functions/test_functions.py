"""Functions of the user's that misbehave in every way, on a real server, and texts that attack others."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from services.settings.rewards.kinds import PythonReward
from tests.harness.process_trees import command_of
from tests.verifier.remote.fake_service import always, serving
from tests.verifier.remote.functions.conftest import OURS, SECRET
from verifier.remote.functions.function_judge import FunctionJudge
from verifier.remote.functions.place import FunctionsPlace
from verifier.remote.functions.warm import TextLimits
from verifier.remote.protocol import Decision
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

RIGHT = Judgement(correct=True, score=1.0)


def source(*lines: str, above: tuple[str, ...] = ()) -> str:
    """A file with a function `score` of these lines."""
    return "\n".join([*above, "def score(prompt, response, reference, metadata):", *(f"    {line}" for line in lines)])


class Judged:
    """Judges texts by a function on the server; closes what it opened."""

    def __init__(self, place: FunctionsPlace) -> None:
        self._place = place
        self._judges: list[FunctionJudge] = []

    async def all(
        self,
        text: str,
        *responses: str,
        files: Mapping[str, str] | None = None,
        function: str = "./rewards.py:score",
        limits: TextLimits | None = None,
    ) -> list[Decision]:
        contents = {name: content.encode() for name, content in {"./rewards.py": text, **(files or {})}.items()}
        options = PythonReward(function=function, needs=("network", "files"))
        judge = FunctionJudge(options, contents, self._place, limits or TextLimits(5, 20), first_pause_s=0.01)
        self._judges.append(judge)
        messages = ({"role": "user", "content": "2 + 2?"},)
        return await judge.judge_all([Candidate(each, {"answer": "4"}, messages, {"n": 1}) for each in responses])

    async def one(self, *lines: str, limits: TextLimits | None = None) -> Judgement | str:
        """The decision on one text by a function of these lines; the text of an error."""
        [decision] = await self.all(source(*lines), "4", limits=limits)
        return str(decision) if isinstance(decision, UndecidedError) else decision

    async def close(self) -> None:
        for judge in self._judges:
            await judge.aclose()


@pytest.fixture
async def judged(place: FunctionsPlace) -> AsyncIterator[Judged]:
    judged = Judged(place)
    yield judged
    await judged.close()


async def test_a_function_gets_all_that_is_documented(judged: Judged) -> None:
    lines = ("return {'score': 0.5, 'correct': True, 'reason': repr((prompt, response, reference, metadata))}",)
    reason = "([{'role': 'user', 'content': '2 + 2?'}], '4', '4', {'n': 1})"
    assert await judged.one(*lines) == Judgement(correct=True, score=0.5, reason=reason)


async def test_texts_are_judged_in_their_order(judged: Judged) -> None:
    responses = [str(number) for number in range(40)]
    decisions = await judged.all(source("return int(response) / 100"), *responses)
    assert [decision.score for decision in decisions if isinstance(decision, Judgement)] == [
        number / 100 for number in range(40)
    ]


FAULTS = {
    "raises": (("return 1 / 0",), "it raised ZeroDivisionError: division by zero (./rewards.py line 2)"),
    "NaN": (("return float('nan')",), "it returned nan (float), expected a bool, a number from 0 to 1, or"),
    "2": (("return 2",), "it returned 2 (int), expected"),
    "None": (("pass",), "it returned None (NoneType), expected"),
    "a text": (("return 'yes'",), "it returned 'yes' (str), expected"),
    "an object": (("return {'points': 3}",), "it returned {'points': 3} (dict), expected"),
    "a missing package": (("import nopackage",), "it raised ModuleNotFoundError: No module named 'nopackage'"),
    "exits": (("import sys", "sys.exit('bye')"), "it raised SystemExit: bye (./rewards.py line 3)"),
    "exits at once": (("import os", "os._exit(7)"), "its process ended without a result (status 7)"),
    "crashes": (("import os", "os.kill(os.getpid(), 11)"), "its process was killed by signal 11"),
    "a deep recursion": (("return score(prompt, response, reference, metadata)",), "it raised RecursionError"),
    "a bad exception": (
        ("class E(Exception):", "    __str__ = lambda self: 1 / 0", "raise E"),
        "it raised E: its text raises ZeroDivisionError (./rewards.py line 4)",
    ),
    "lines": (("raise ValueError('a\\nb\\x1b[31m')",), "it raised ValueError: a b [31m (./rewards.py line 2)"),
}


@pytest.mark.parametrize(("lines", "expected"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_is_unknown_and_says_where(judged: Judged, lines: tuple[str, ...], expected: str) -> None:
    text = await judged.one(*lines)
    assert isinstance(text, str)
    assert text.startswith("functions: ./rewards.py:score: ")
    assert expected in text
    assert "\n" not in text


LATE = {
    "sleeps": (("import time", "time.sleep(60)"), TextLimits(5, 1), "it took longer than 1 s and was killed"),
    "ignores signals": (
        ("import signal, time", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(60)"),
        TextLimits(5, 1),
        "it took longer than 1 s and was killed",
    ),
    "computes": (("while True: pass",), TextLimits(1, 20), "it used more than 1 s of CPU time and was killed"),
    "computes on": (
        ("import signal", "signal.signal(signal.SIGXCPU, signal.SIG_IGN)", "while True: pass"),
        TextLimits(1, 20),
        "it used more than 1 s of CPU time and was killed",
    ),
    "answers but stays": (
        (
            "import os, stat, time",
            "for fd in range(3, 64):",
            "    try:",
            "        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b'{\"score\": 1}')",
            "    except OSError: pass",
            "time.sleep(60)",
        ),
        TextLimits(5, 1),
        "it took longer than 1 s and was killed",
    ),
}


@pytest.mark.parametrize(("lines", "limits", "expected"), LATE.values(), ids=LATE)
async def test_a_hang_is_killed(judged: Judged, lines: tuple[str, ...], limits: TextLimits, expected: str) -> None:
    async with asyncio.timeout(50):  # those that sleep would end by themselves after 60 s
        assert await judged.one(*lines, limits=limits) == f"functions: ./rewards.py:score: {expected}"


async def test_a_hang_delays_no_other_text(judged: Judged) -> None:
    text = source("import time", "if response == 'hang': time.sleep(60)", "return True")
    limits = TextLimits(5, 2)
    hang, *others = await judged.all(text, "hang", *["4"] * 7, limits=limits)
    assert "it took longer than 2 s" in str(hang)
    assert others == [RIGHT] * 7


DAEMON = source(
    "import os, time",
    "for _ in range(3):",
    "    if os.fork() == 0:",
    "        os.setsid()",
    "        if os.fork() == 0:",
    "            open(response, 'a').write(f'{os.getpid()} ')",
    "            os.closerange(0, 256)",
    "            time.sleep(600)",
    "        os._exit(0)",
    "    os.wait()",
    "while len(open(response).read().split()) < 3: time.sleep(0.01)",
    "if reference != '4': time.sleep(600)",
    "return True",
)


async def test_a_daemon_ends_with_its_text(judged: Judged, tmp_path: Path) -> None:
    assert await judged.all(DAEMON, str(tmp_path / "pids")) == [RIGHT]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


async def test_a_hang_is_killed_with_its_daemons(judged: Judged, tmp_path: Path) -> None:
    text = DAEMON.replace("reference != '4'", "reference == '4'")
    [decision] = await judged.all(text, str(tmp_path / "pids"), limits=TextLimits(5, 2))
    assert "it took longer than 2 s" in str(decision)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


JUMPING = source(
    "import fcntl, os, time",
    "held = open(response, 'a')",
    "fcntl.flock(held, fcntl.LOCK_EX)",  # held by all that inherit it, until the last one ends
    "for _ in range(4):",
    "    if os.fork() == 0:",
    "        os.setsid()",
    "        while True:",
    "            if os.fork(): os._exit(0)",
    "time.sleep(0.2)",
    "return True",
)


async def test_processes_that_fork_and_end_are_met(judged: Judged, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    for _ in range(3):
        assert await judged.all(JUMPING, str(lock)) == [RIGHT]
        with lock.open("a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_one_gigabyte_of_output_is_discarded(judged: Judged) -> None:
    lines = ("import sys", "for _ in range(1024): print('x' * (1 << 20))", "print('y' * 99, file=sys.stderr)")
    assert await judged.one(*lines, "return True") == RIGHT


async def test_a_long_reason_is_cut(judged: Judged) -> None:
    decision = await judged.one("return {'score': 1, 'reason': 'x' * (64 << 20)}")
    assert isinstance(decision, Judgement)
    assert len(decision.reason) == 300


async def test_a_forged_flood_is_unknown(judged: Judged) -> None:
    flood = (
        "import os",
        "for fd in range(3, 64):",
        "    try:",
        "        for _ in range(1024): os.write(fd, b'[' * 65536)",
    )
    text = await judged.one(*flood, "    except OSError: pass", "os._exit(0)", limits=TextLimits(5, 20))
    assert text == "functions: ./rewards.py:score: its process ended without a result (status 0)"


IMPORTS = {
    "a missing package": (
        source("return True", above=("import os", "import nopackage")),
        "it cannot be imported: ModuleNotFoundError: No module named 'nopackage' (./rewards.py line 2)",
    ),
    "a syntax error": ("def score(:", "it cannot be imported: SyntaxError: invalid syntax (./rewards.py line 1)"),
    "an exit": ("import sys; sys.exit(3)", "it cannot be imported: SystemExit: 3 (./rewards.py line 1)"),
    "a hard exit": ("import os; os._exit(3)", "its process ended during the import (status 3)"),
    "no such function": ("def other(): pass", "./rewards.py has no function score: expected one of other"),
    "not a function": ("score = 3", "./rewards.py has no function score: expected one of none"),
}


@pytest.mark.parametrize(("text", "expected"), IMPORTS.values(), ids=IMPORTS)
async def test_a_file_that_cannot_be_imported(judged: Judged, text: str, expected: str) -> None:
    decisions = await judged.all(text, "4", "5")
    assert [str(decision) for decision in decisions] == [f"functions: ./rewards.py:score: {expected}"] * 2


async def test_files_beside_the_recipe_can_be_used(judged: Judged) -> None:
    text = source("return helper.same(response, reference)", above=("import helper",))
    files = {
        "./helper.py": "def same(a, b): return a == b and open('data/x.txt').read() == 'x'",
        "./data/x.txt": "x",
    }
    assert await judged.all(text, "4", files=files) == [RIGHT]


async def test_names_of_other_modules_can_be_used(judged: Judged) -> None:
    for name in ("json", "verifier", "deep/er/mine"):
        files = {f"./{name}.py": source("return True")}
        assert await judged.all("", "4", files=files, function=f"./{name}.py:score") == [RIGHT]


async def test_network_files_and_programs_can_be_used(judged: Judged, tmp_path: Path) -> None:
    lines = (
        "import subprocess, sys, urllib.request",
        "open(response + '/written', 'w').write('x')",
        "said = subprocess.run([sys.executable, '-c', 'print(4)'], capture_output=True, text=True).stdout",
        "got = urllib.request.urlopen(open(response + '/url').read()).read()",
        "return {'score': 1, 'reason': f'{said.strip()} {got.decode()}'}",
    )
    async with serving(always(200, b"over the network")) as service:
        (tmp_path / "url").write_text(service.url)
        [decision] = await judged.all(source(*lines), str(tmp_path))
    assert decision == Judgement(correct=True, score=1.0, reason="4 over the network")
    assert (tmp_path / "written").read_text() == "x"


async def test_a_function_of_a_package_can_be_used(judged: Judged) -> None:
    [decision] = await judged.all("", "4", function="operator:eq")
    assert "operator:eq: it raised TypeError: eq expected 2 arguments, got 4" in str(decision)


async def test_a_file_is_imported_once(judged: Judged, tmp_path: Path) -> None:
    text = source("return True", above=(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')",))
    assert await judged.all(text, *["4"] * 30) == [RIGHT] * 30
    assert (tmp_path / "imports").read_text() == "x"


async def test_a_text_leaves_nothing_to_the_next(judged: Judged) -> None:
    lines = ("global seen", "seen += 1", "import builtins", "builtins.sum = None", "return seen == 1")
    assert await judged.all(source(*lines, above=("seen = 0",)), *["4"] * 10) == [RIGHT] * 10


async def test_only_named_variables_are_passed(judged: Judged) -> None:
    decision = await judged.one("import os", "return {'score': 1, 'reason': repr(sorted(os.environ.items()))}")
    assert isinstance(decision, Judgement)
    assert "USER_REWARD_KEY" in decision.reason or len(decision.reason) == 300
    names = await judged.one("import os", "return {'score': 1, 'reason': ' '.join(sorted(os.environ))}")
    assert isinstance(names, Judgement)
    allowed = {"HOME", "LANG", "PATH", "TMPDIR", "TZ", "PYTHONPATH", "USER_REWARD_KEY", "LC_CTYPE"}
    assert "USER_REWARD_KEY" in names.reason.split()
    assert set(names.reason.split()) <= allowed


SEARCH = source(
    "import os, pathlib",
    "found = []",
    "for process in pathlib.Path('/proc').glob('[0-9]*'):",
    "    for name in ('environ', 'mem', 'maps'):",
    "        try:",
    "            with open(process / name, 'rb') as opened:",
    "                if name == 'environ' and any(word.encode() in opened.read() for word in response.split()):",
    "                    found.append(f'{name} of {process.name}')",
    "                if name == 'mem' and int(process.name) != os.getpid(): found.append(f'mem of {process.name}')",
    "        except OSError: pass",
    "return {'score': 1, 'reason': ', '.join(found)}",
)


async def test_no_secret_of_ours_is_in_reach(judged: Judged) -> None:
    words = [SECRET, *(value for name, value in OURS.items() if name != "USER_REWARD_KEY")]
    assert await judged.all(SEARCH, " ".join(words)) == [RIGHT]


SIGNAL = source(
    "import os, signal",
    "done = []",
    "for pid in [os.getppid(), *map(int, filter(str.isdecimal, os.listdir('/proc')))]:",
    "    if pid in (1, os.getpid()): continue",
    "    try:",
    "        os.kill(pid, 0)",
    "        done.append(str(pid))",
    "    except OSError: pass",
    "return {'score': 1, 'reason': ' '.join(done)}",
)


async def test_other_processes_cannot_be_signalled(judged: Judged) -> None:
    assert await judged.all(SIGNAL, "4") == [RIGHT]


async def test_a_changed_file_is_laid_out_again(judged: Judged) -> None:
    lines = (
        "import helper, os",
        "if response == 'attack':",
        "    os.chmod('helper.py', 0o600)",
        "    open('helper.py', 'w').write('VALUE = 1')",
        "return helper.VALUE",
    )
    files = {"./helper.py": "VALUE = 0"}
    await judged.all(source(*lines), "attack", files=files)
    [decision] = await judged.all(source(*lines), "4", files=files)
    assert decision == Judgement(correct=False, score=0.0)


async def test_a_planted_module_is_not_imported(judged: Judged) -> None:
    lines = (
        "if response == 'attack': open('colorsys.py', 'w').write('VALUE = 1')",
        "import colorsys",
        "return hasattr(colorsys, 'VALUE')",
    )
    await judged.all(source(*lines), "attack")
    assert await judged.all(source(*lines), "4") == [Judgement(correct=False, score=0.0)]


async def test_a_killed_function_is_started_again(judged: Judged, tmp_path: Path) -> None:
    text = source("return True", above=("import os", f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"))
    assert await judged.all(text, "4") == [RIGHT]
    host = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(host.pid, 9)
    async with asyncio.timeout(5):
        while host.is_running() and host.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    assert await judged.all(text, "4") == [RIGHT]


async def test_many_functions_are_held_in_turn(judged: Judged) -> None:
    for number in range(12):
        assert await judged.all(source(f"return {number} < 12"), "4") == [RIGHT]
    assert len([child for child in server_children() if "verifier.remote.functions.host" in child]) <= 9


def server_children() -> list[str]:
    servers = "-m verifier.remote.functions "
    [server] = [child for child in psutil.Process().children() if servers in f"{command_of(child)} "]
    return list(filter(None, map(command_of, server.children())))
