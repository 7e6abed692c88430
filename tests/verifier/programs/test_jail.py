"""Jails from outside: several at once, cancelled ones, ones that fail; nothing is ever left of them."""

import asyncio
import time

import psutil
import pytest

from verifier.programs import verdict
from verifier.programs.isolation import Isolation, IsolationChoice, IsolationError
from verifier.programs.jail import Jail, JailError
from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import judge
from verifier.verifiers.base import UndecidedError

PLAIN = IsolationChoice(Isolation.GVISOR)
"""Without a jail, as inside of gVisor."""
VALUE = {"kind": "values", "setup": "", "arguments": None, "aliases": {}}
FOREVER = {"asserts": ["assert solve() == 1"]}
DAEMONS = """
import os, time
def solve():
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            os.fork()
            time.sleep(600)
    time.sleep({seconds})
    return 1
"""


@pytest.fixture(params=["jail", "gVisor"])
def choice(request):
    return PLAIN if request.param == "gVisor" else request.getfixturevalue("isolation")


def supervisors():
    """The processes of this machine with a supervisor's command line, as programs have it as well."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any("verifier.programs.inside" in part for part in process.info["cmdline"] or ()):
            found.add(process)
    return found


async def until(fact, seconds=10.0):
    """Wait until a fact holds."""
    last = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < last
        await asyncio.sleep(0.02)


def values(*expressions):
    return VALUE | {"expressions": expressions}


async def test_a_cancelled_jail_leaves_no_process(choice):
    before = supervisors()

    async def run():
        async with Jail(choice, DAEMONS.format(seconds=600), "", ProgramLimits(wall_s=600)) as jail:
            await jail.run(values("solve()"))

    task = asyncio.create_task(run())
    await until(lambda: len(supervisors() - before) >= 9)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert supervisors() <= before


async def test_a_jail_cancelled_at_its_start_leaves_no_process(choice):
    before = supervisors()
    for delay in (0.0, 0.005, 0.02, 0.05):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay), Jail(choice, "while True: pass", "", ProgramLimits()) as jail:
                await jail.run(values("1"))
    await until(lambda: supervisors() <= before)


async def test_daemons_are_gone_after_their_test(choice):
    before = supervisors()
    async with Jail(choice, DAEMONS.format(seconds=0), "", ProgramLimits()) as jail:
        assert (await jail.run(values("solve()")))["result"] == "[1]\n"
        assert len({each for each in supervisors() - before if each.status() != psutil.STATUS_ZOMBIE}) <= 2
    assert supervisors() <= before


@pytest.mark.parametrize(
    ("program", "limits", "exceeded"),
    [
        ("while True: pass", {"cpu_s": 1}, "cpu"),
        ("import time; time.sleep(60)", {"wall_s": 0.5}, "wall"),
        ("import os\nwhile True: os.write(1, bytes(1000))", {}, "output"),
        ("import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(60)", {}, "processes"),
        ("import os, time\nwhile True:\n    try: os.fork()\n    except OSError: pass", {}, "processes"),
    ],
)
async def test_limits_hold_with_and_without_a_jail(choice, program, limits, exceeded):
    before = supervisors()
    async with Jail(choice, program, "", ProgramLimits(**limits)) as jail:
        frame = await jail.run({"kind": "output", "stdin": ""})
        if exceeded == "processes" and not frame["limit"]:  # the limit of the kernel came first
            assert "BlockingIOError" in frame["stderr"]
        else:
            assert frame["limit"] == exceeded or (exceeded == "processes" and frame["limit"] in ("cpu", "wall"))
    assert supervisors() <= before


async def test_no_signal_leaves_a_program_without_a_jail():
    program = "import os\ndef solve(): os.kill(os.getppid(), 9)"
    async with Jail(PLAIN, program, "", ProgramLimits()) as jail:
        assert "PermissionError" in (await jail.run(values("solve()")))["result"]


async def test_programs_run_at_once(isolation):
    program = "import time\ndef solve():\n    time.sleep(3)\n    return 1"
    started = time.monotonic()
    found = await asyncio.gather(*(judge(program, FOREVER, {}, ProgramLimits()) for _ in range(6)))
    assert all(each.correct for each in found)
    assert time.monotonic() - started < 6 * 3


async def test_a_program_passes_a_hundred_tests(judged):
    found = await judged("print(input())", {"tests": [{"stdin": f"{n}\n", "stdout": f"{n}\n"} for n in range(100)]})
    assert found.correct, found.reason


async def test_the_tests_of_a_program_share_an_interpreter(choice):
    """The addresses of an interpreter's objects and the seed of its hashes are its own."""
    program = "import os, sys\nprint(os.getppid(), id(sys.modules), hash('seed'))"
    seen = set()
    for _ in range(2):
        async with Jail(choice, program, "", ProgramLimits()) as jail:
            outputs = [(await jail.run({"kind": "output", "stdin": ""}))["stdout"] for _ in range(5)]
            assert outputs == [outputs[0]] * 5
            assert outputs[0].count(" ") == 2
            seen.add(outputs[0])
    assert len(seen) == 2, "otherwise this test would prove nothing"


async def test_without_isolation_there_is_no_verdict(monkeypatch):
    def none():
        raise IsolationError("no isolation for programs on this machine: bubblewrap: not on PATH")

    monkeypatch.setattr(verdict, "find_isolation", none)
    with pytest.raises(UndecidedError, match="bubblewrap: not on PATH"):
        await judge("def solve(): return 1", FOREVER, {}, ProgramLimits())


@pytest.mark.parametrize(
    "script", ["#!/bin/sh\necho 'no permission' >&2\nexit 1\n", "#!/bin/sh\nexit 3\n", "not a program"]
)
async def test_a_jail_that_does_not_start_is_our_fault(tmp_path, monkeypatch, script):
    program = tmp_path / "bwrap"
    program.write_text(script)
    program.chmod(0o755)
    broken = IsolationChoice(Isolation.BUBBLEWRAP, str(program))
    monkeypatch.setattr(verdict, "find_isolation", lambda: broken)
    with pytest.raises(UndecidedError, match=r"bubblewrap .*(no permission|status 3|Exec format error)"):
        await judge("def solve(): return 1", FOREVER, {}, ProgramLimits())


async def test_a_jail_that_hangs_at_its_start_is_killed(tmp_path, monkeypatch):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr("verifier.programs.jail.START_S", 0.2)
    with pytest.raises(JailError, match="took too long to start"):
        async with Jail(IsolationChoice(Isolation.BUBBLEWRAP, str(program)), "", "", ProgramLimits(wall_s=0.1)):
            pass
    assert not [each for each in psutil.Process().children() if "sleep" in each.name()]
