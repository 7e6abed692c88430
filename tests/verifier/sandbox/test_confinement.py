"""What a judged text cannot do even if it runs code: each test attempts one action, which must fail."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.contracts import Outcome
from tests.verifier.sandbox.judged import (
    EVALUATED,
    GYM,
    HOSTILE,
    MATH,
    PATTERN,
    PROGRAM,
    found_in,
    matching,
    pid_of,
    ran,
    warm_parents,
)
from verifier.sandbox.confinement import ALLOWED
from verifier.sandbox.pool import Sandbox, SandboxError
from verifier.verifiers.base import Candidate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has seccomp and Landlock")

SECRET = "correct-horse"
REFUSED = f"PermissionError {errno.EPERM}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A sandbox whose processes run code, started by a process that has secrets in its environment and in a file."""
    secrets = {"AWS_SECRET_ACCESS_KEY": SECRET, "RAY_AUTH_TOKEN": SECRET, "REDIS_PASSWORD": SECRET, "HF_TOKEN": SECRET}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in secrets.items():
            patch.setenv(name, value)
        with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
            yield sandbox


@pytest.fixture(scope="module")
def landlock():
    with Sandbox(1, 20.0, [PATTERN]) as sandbox:
        gaps = asyncio.run(sandbox.start())
    if gaps:
        pytest.skip(f"this kernel does not restrict reading of files: {gaps[0]}")


@pytest.fixture
def bystander():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


FORBIDDEN = {
    "TCP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "IPv6": "import socket; socket.socket(socket.AF_INET6)",
    "Unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "pair of sockets": "import socket; socket.socketpair()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "fork": "import os; os.fork()",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'])",
    "signal to the parent": "import os; os.kill(os.getppid(), 0)",
    "signal to a bystander": "import os, signal; os.kill(bystander, signal.SIGKILL)",
    "signal to every process": "import os; os.kill(-1, 0)",
    "signal to its group": "import os; os.killpg(0, 0)",
    "signal by descriptor": "import os; os.pidfd_open(bystander)",
    "signal to itself": "import os; os.kill(os.getpid(), 0)",
    "stop of itself": "import signal; signal.raise_signal(signal.SIGSTOP)",
    "end of its children": "import os; os.waitpid(-1, 0)",
    "death of its parent ignored": "import ctypes, os\n"
    "if ctypes.CDLL(None, use_errno=True).prctl(1, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), '')",
    "signal through a file": "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, bystander)",
    "limits of a bystander": "import resource; resource.prlimit(bystander, resource.RLIMIT_NOFILE, (0, 0))",
    "own limits": "import ctypes, resource, os\n"
    "if ctypes.CDLL(None, use_errno=True).prlimit(0, resource.RLIMIT_NOFILE, (ctypes.c_uint64 * 2)(9, 9), None):\n"
    "    raise OSError(ctypes.get_errno(), '')",
    "file written": "open(folder + '/new', 'w')",
    "file appended": "open(folder + '/secret', 'a')",
    "file emptied": "import os; os.open(folder + '/secret', os.O_RDONLY | os.O_TRUNC)",
    "file created": "import os; os.open(folder + '/new', os.O_RDONLY | os.O_CREAT)",
    "nameless file": "import os; os.open(folder, os.O_TMPFILE | os.O_RDWR)",
    "shared memory": "open('/dev/shm/new', 'w')",
    "file truncated": "import os; os.truncate(folder + '/secret', 0)",
    "file removed": "import os; os.unlink(folder + '/secret')",
    "file renamed": "import os; os.rename(folder + '/secret', folder + '/other')",
    "file linked": "import os; os.link(folder + '/secret', folder + '/other')",
    "symbolic link": "import os; os.symlink('/etc/passwd', folder + '/other')",
    "mode": "import os; os.chmod(folder + '/secret', 0o777)",
    "folder": "import os; os.mkdir(folder + '/other')",
    "pipe with a name": "import os; os.mkfifo(folder + '/other')",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, bystander, 19)",
    "affinity": "import os; os.sched_setaffinity(bystander, {0})",
}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_forbidden_action_is_rejected(hostile, bystander, tmp_path, name):
    (tmp_path / "secret").write_text(SECRET)
    assert await ran(hostile, FORBIDDEN[name], bystander=bystander.pid, folder=str(tmp_path)) == REFUSED
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == SECRET


SYSTEM_CALLS = (
    *("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "sendto", "recvfrom"),
    *("sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "setsockopt", "io_uring_setup", "io_uring_enter"),
    *("io_uring_register", "execve", "execveat", "clone", "fork", "vfork", "ptrace", "process_vm_readv"),
    *("process_vm_writev", "process_madvise", "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal"),
    *("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prctl", "seccomp", "landlock_restrict_self", "bpf"),
    *("perf_event_open", "userfaultfd", "memfd_create", "add_key", "request_key", "keyctl", "mount", "umount2"),
    *("pivot_root", "chroot", "unshare", "setns", "setuid", "setresuid", "capset", "open_by_handle_at"),
    *("name_to_handle_at", "fanotify_init", "inotify_init1", "mq_open", "shmget", "shmat", "msgget", "semget"),
    *("timer_create", "setpriority", "ioprio_set", "sched_setscheduler", "setrlimit", "openat", "open"),
    *("creat", "splice", "sendfile", "copy_file_range", "init_module", "reboot", "swapon", "sethostname"),
    *("personality", "modify_ldt", "kill", "tgkill"),
)
AS_IF_OLDER = ("clone3", "openat2")
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
found = [name for name, number in calls.items()
         if libc.syscall(number, 1, 1, 1, 1, 1, 1) != -1 or ctypes.get_errno() != expected]
"""


def numbers(names):
    import pyseccomp

    found = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in names}
    return {name: number for name, number in found.items() if number >= 0}


async def test_system_calls_that_judging_does_not_need_are_rejected(hostile):
    assert len(numbers(SYSTEM_CALLS)) > 60
    assert await ran(hostile, CALL, calls=numbers(SYSTEM_CALLS), expected=errno.EPERM) == "[]"
    assert await ran(hostile, CALL, calls=numbers(AS_IF_OLDER), expected=errno.ENOSYS) == "[]"
    assert await ran(hostile, CALL, calls=numbers(["ioctl"]), expected=errno.ENOTTY) == "[]"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86_64 has the x32 interface")
async def test_a_call_through_the_x32_interface_kills_the_process(hostile):
    x32 = 0x40000000
    found = await found_in(hostile, f"import ctypes; ctypes.CDLL(None).syscall({x32} + 41, 2, 1, 0)")
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died")
    assert await ran(hostile, "found = 1") == "1"


async def test_no_thread_is_started(hostile):
    assert await ran(hostile, "import threading; threading.Thread(target=print).start()") == "RuntimeError"


PATHS = (
    *("{folder}/secret", "/proc/{parent}/environ", "/proc/{parent}/mem", "/proc/{parent}/cmdline"),
    *("/proc/self/environ", "/proc/self/maps", "/etc/passwd", "/etc/hosts", "/root/.bashrc"),
    *("{root}/pyproject.toml", "{root}/services/process/hosting.py", "/dev/mem", "/dev/shm", "/tmp", "/"),
)


@pytest.mark.usefixtures("landlock")
@pytest.mark.parametrize("path", PATHS)
async def test_a_file_outside_pythons_folders_is_not_read(hostile, tmp_path, path):
    (tmp_path / "secret").write_text(SECRET)
    exists = path.startswith(("{folder}", "{root}"))
    path = path.format(folder=tmp_path, parent=os.getpid(), root=Path(__file__).parents[3])
    code = "import os; found = 'absent' if not os.path.lexists(path) else os.open(path, os.O_RDONLY)"
    assert await ran(hostile, code, path=path) in {f"PermissionError {errno.EACCES}", *([] if exists else ["absent"])}


async def test_no_secret_is_in_the_environment(hostile):
    code = "import os; found = [value in str(dict(os.environ)) for value in (secret, passed)]"
    assert await ran(hostile, code, secret=SECRET, passed=os.environ["PATH"]) == "[False, True]"
    process = psutil.Process(await pid_of(hostile))
    block = process.environ()  # the variables from its start, which the process cannot clear
    assert SECRET not in block.values()
    assert "PYTHONPATH" in block


async def test_the_only_open_files_are_its_pipes(hostile):
    folder = f"/proc/{await pid_of(hostile)}/fd"
    held = [os.readlink(f"{folder}/{name}").split(":")[0] for name in os.listdir(folder)]
    assert sorted(held) == ["/dev/null"] * 4 + ["pipe"] * 2


async def test_the_resources_of_a_process_are_limited(hostile):
    code = "import resource; found = [resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))[1] for name in names]"
    names = ["CPU", "CORE", "FSIZE", "NOFILE", "NPROC"]
    assert await ran(hostile, code, names=names) == str([3600, 0, 0, 64, 0])
    assert await ran(hostile, "bytearray(5 << 30)") == "MemoryError"


IN_CONTAINER = """
import sys
from verifier.sandbox import confinement
confinement.MEMORY_LIMITS = ({limit!r}, "/absent")
from tests.verifier.sandbox.hostile import server
server.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("limit", "least", "most"),
    [
        ("max", 4 << 30, 4 << 30),
        pytest.param(str(64 << 30), 4 << 30, 4 << 30, marks=pytest.mark.slow),
        (str(2 << 30), 512 << 20, 512 << 20),
        pytest.param(str(1 << 20), 256 << 20, 511 << 20, marks=pytest.mark.slow),
    ],
)
async def test_the_memory_limit_is_a_share_of_the_containers(tmp_path, monkeypatch, limit, least, most):
    (tmp_path / "limit").write_text(f"{limit}\n")
    (tmp_path / "contained_judging.py").write_text(IN_CONTAINER.format(limit=str(tmp_path / "limit")))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, program="contained_judging") as sandbox:
        bound = int(await ran(sandbox, "import resource; found = resource.getrlimit(resource.RLIMIT_AS)[1]"))
        assert least <= bound <= most
        assert await ran(sandbox, "bytearray(bound)", bound=bound) == "MemoryError"
        assert (await sandbox.judge(MATH, Candidate(r"\boxed{2}", {"answer": "2"}))).outcome is Outcome.CORRECT


def test_out_of_memory_kills_the_judging_process_first(hostile):
    pid = asyncio.run(pid_of(hostile))
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


@pytest.mark.parametrize("by", [HOSTILE, EVALUATED], ids=["shared", "own process"])
@pytest.mark.parametrize("code", ["os.abort()", "os._exit(0)", "import ctypes; ctypes.string_at(0)"])
async def test_the_end_of_a_process_ends_only_that_process(hostile, by, code):
    parents = {each.pid for each in warm_parents()}
    other = await pid_of(hostile)
    found = await found_in(hostile, f"import os; {code}", by)
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died")
    assert {each.pid for each in warm_parents()} >= parents
    assert (await pid_of(hostile) == other) is (by is EVALUATED)


async def test_judging_continues_after_all_attempts(hostile):
    assert (await hostile.judge(MATH, Candidate(r"\boxed{\frac{1}{2}}", {"answer": "0.5"}))).outcome is Outcome.CORRECT


EXPLOITS = {
    "a file": "[open({file!r}, 'w')]",
    "a program": "[__import__('os').system('touch ' + {file!r})]",
    "a connection": "[__import__('socket').create_connection(('127.0.0.1', {port}))]",
    "a signal": "[__import__('os').kill({pid}, 9)]",
}
EVALUATING_TASKS = ("string_insertion", "spiral_matrix", "simple_integration", "countdown", "puzzle24")
"""Some of the tasks whose reasoning-gym scorer runs an answer as Python."""

EVALUATING = """import sys
from verifier.sandbox import server
from verifier.verifiers import reasoning_gym
reasoning_gym.is_plain = lambda *_: True
reasoning_gym._uses_given_numbers = lambda *_: True
{}
server.main(sys.argv[1:])
"""
"""A program that gives a scorer every answer: the confinement must hold where the look at the answer fails."""


async def answered(sandbox, task, answer):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
    return await sandbox.judge(GYM, Candidate(f"<answer>{answer}</answer>", {"task": task, "entry": entry}))


@pytest.fixture(scope="module", params=["as it is", "every answer evaluated"])
def real(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    (folder / "evaluating_judging.py").write_text(EVALUATING.format(""))
    program = "verifier.sandbox.server" if request.param == "as it is" else "evaluating_judging"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with Sandbox(1, 20.0, [GYM], program=program) as sandbox:
            yield sandbox


@pytest.mark.parametrize("name", EXPLOITS)
@pytest.mark.parametrize("task", EVALUATING_TASKS)
async def test_an_answer_that_a_scorer_evaluates_reaches_nothing(real, task, name, bystander, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        places = {"file": str(tmp_path / "made"), "port": server.getsockname()[1], "pid": bystander.pid}
        found = await answered(real, task, EXPLOITS[name].format(**places))
        with pytest.raises(TimeoutError):
            server.accept()
    assert found.outcome is not Outcome.CORRECT, found
    assert not list(tmp_path.iterdir())


async def test_the_same_answers_succeed_without_confinement(tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    without = "server.confine, server.confine_further = list, lambda: lambda: None"
    (tmp_path / "unconfined_judging.py").write_text(EVALUATING.format(without))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [GYM], program="unconfined_judging") as sandbox:
        for task in EVALUATING_TASKS:
            made = tmp_path / task
            await answered(sandbox, task, EXPLOITS["a program"].format(file=str(made)))
            assert made.exists(), task


LAX = {
    "without a filter of system calls": (
        "confinement._filter_calls = lambda seccomp: None",
        "tried a TCP socket, and it succeeded",
    ),
    "a second thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "2 is not valid: expected 1",
    ),
    "no libseccomp": (
        "import ctypes.util, sys; sys.modules.pop('pyseccomp', None)\n"
        "find = ctypes.util.find_library\n"
        "ctypes.util.find_library = lambda name: None if name == 'seccomp' else find(name)",
        "Unable to find libseccomp; install it",
    ),
    "survives its parent": ("from verifier.processes import prctl; prctl.PR_SET_PDEATHSIG = 9999", "Invalid argument"),
}
PROGRAM_WITH = """import sys
from verifier.sandbox import confinement
{}
from verifier.sandbox.server import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("name", LAX)
async def test_a_process_that_is_not_confined_does_not_judge(name, tmp_path, monkeypatch):
    source, reason = LAX[name]
    (tmp_path / "lax_judging.py").write_text(PROGRAM_WITH.format(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [PATTERN], program="lax_judging") as sandbox:
        with pytest.raises(SandboxError, match=reason):
            await sandbox.start()
        for _ in range(6):  # more often than a warm parent that dies is started again
            found = await sandbox.judge(*matching("a"))
            assert found.outcome is Outcome.UNKNOWN
            assert reason in found.reason


async def test_a_judging_process_that_could_fork_does_not_judge(tmp_path, monkeypatch):
    (tmp_path / "forking_judging.py").write_text(PROGRAM_WITH.format("confinement.DROPPED_CALLS = ()"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [PATTERN], program="forking_judging") as sandbox:
        await sandbox.start()
        found = await sandbox.judge(*matching("a"))
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died"), found


WEAKER = {
    "darwin": ("sys.platform = 'darwin'", "darwin has no seccomp"),
    "no Landlock": (
        "import landlockpy\n"
        "def absent(**_): raise landlockpy.UnsupportedError(38, 'Function not implemented')\n"
        "landlockpy.Ruleset = absent",
        "Landlock is not available (Function not implemented)",
    ),
}


@pytest.mark.parametrize("name", WEAKER)
async def test_gaps_of_a_platform_are_reported(name, tmp_path, monkeypatch):
    source, gap = WEAKER[name]
    (tmp_path / "weaker_judging.py").write_text(PROGRAM_WITH.format(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [PATTERN], program="weaker_judging") as sandbox:
        [reported] = await sandbox.start()
        assert reported.startswith(gap)
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT


async def test_a_process_that_is_not_ready_in_time_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "slow_judging.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        Sandbox(1, 20.0, [PATTERN], start_s=0.5, program="slow_judging") as sandbox,
        pytest.raises(SandboxError, match=r"not ready within 0\.5 s"),
    ):
        await sandbox.start()


@pytest.mark.parametrize(
    ("machine", "lacks"),
    [
        ("X86_64", set()),
        ("AARCH64", {"dup2", "poll", "select", "stat", "lstat", "access", "readlink", "alarm", "time"}),
    ],
)
def test_every_system_call_in_the_table_is_known(machine, lacks):
    """libseccomp would silently skip a name that it does not know."""
    import pyseccomp

    found = {name: pyseccomp.resolve_syscall(getattr(pyseccomp.Arch, machine), name) for name in ALLOWED}
    unknown = -1
    assert unknown not in found.values()
    assert {name for name, number in found.items() if number < 0} == lacks
