"""What a program can do to the machine: each test lets one try, and looks from outside at what is left."""

import errno
import os
import socket
import time

import psutil
import pytest

from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import judge

ONE = {"asserts": ["assert solve() == 'went through'"]}
MARK = "penstock-hostile-program"


def left_behind():
    """The processes of jails, by what only they have in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "verifier.programs.inside" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def everywhere():
    """All processes of this machine that run a supervisor, by any test."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any("verifier.programs.inside" in part for part in process.info["cmdline"] or ()):
            found.add(process.pid)
    return found


async def tried(judged, body, **limits):
    """The reason of the verdict on a function with this body; it is right when it returns 'went through'."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    found = await judged(f"import os, sys\ndef solve():\n{lines}", ONE, **limits)
    return "went through" if found.correct else found.reason


async def test_a_harmless_function_goes_through(judged):
    """Otherwise the tests below would prove nothing."""
    assert await tried(judged, "return 'went through'") == "went through"


FORBIDDEN = {
    "TCP": ("import socket\nsocket.socket(socket.AF_INET)", errno.EPERM),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", errno.EPERM),
    "IPv6": ("import socket\nsocket.socket(socket.AF_INET6)", errno.EPERM),
    "a Unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", errno.EPERM),
    "netlink": ("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", errno.EPERM),
    "a file of the system": ("open('/usr/lib/written', 'w')", errno.EROFS),
    "a file at the root": ("open('/written', 'w')", errno.EROFS),
    "a device's folder": ("open('/dev/written', 'w')", errno.EROFS),
    "the package": ("open('/penstock/verifier/__init__.py', 'a')", None),
    "users": ("open('/etc/passwd')", errno.ENOENT),
    "the home of root": ("os.listdir('/root/.ssh')", errno.ENOENT),
    "its supervisor's memory": ("open('/proc/1/mem', 'rb')", errno.EACCES),
    "its supervisor's variables": ("open('/proc/1/environ', 'rb')", errno.EACCES),
    "its supervisor's files": ("os.listdir('/proc/1/fd')", errno.EACCES),
    "a setting of the kernel": ("open('/proc/sys/kernel/core_pattern', 'w')", None),
    "the kernel's trigger": ("open('/proc/sysrq-trigger', 'w')", None),
    "the kernel's log": ("open('/proc/kmsg')", errno.EACCES),
    "a shell": ("os.execv('/bin/sh', ['sh'])", None),
    "a program of the system": ("os.execv('/usr/bin/env', ['env'])", errno.ENOENT),
    "the host's name": ("import socket\nsocket.sethostname('x')", errno.EPERM),
    "a priority": ("os.setpriority(os.PRIO_PROCESS, 1, 19)", errno.EPERM),
    "limits of its supervisor": ("import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))", errno.EPERM),
    "higher limits": ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))", None),
    "another user": ("os.setuid(0)", errno.EPERM),
    "memory without a process": ("os.memfd_create('x')", errno.EPERM),
    "shared memory without a file": ("import mmap\nmmap.mmap(-1, 4096)", errno.EPERM),
    "a descriptor of a process": ("os.pidfd_open(1)", errno.EPERM),
    "the root folder": ("os.chroot('/tmp')", errno.EPERM),
}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_forbidden_action_is_rejected(judged, name):
    action, code = FORBIDDEN[name]
    reason = await tried(judged, f"{action}\nreturn 'went through'")
    assert "Error" in reason, reason
    assert code is None or f"[Errno {code}]" in reason, reason


CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "pidfd_send_signal", "bpf", "mount"),
    *("umount2", "pivot_root", "unshare", "setns", "keyctl", "add_key", "request_key", "userfaultfd", "syslog"),
    *("perf_event_open", "io_uring_setup", "io_uring_enter", "open_by_handle_at", "name_to_handle_at", "reboot"),
    *("init_module", "kexec_load", "swapon", "fsopen", "open_tree", "move_mount", "shmget", "msgget", "semget"),
    *("mq_open", "personality", "sched_setaffinity", "sched_setscheduler", "seccomp", "memfd_secret", "socket"),
    *("connect", "bind", "sendmmsg", "capset", "setresuid", "fanotify_init", "quotactl", "settimeofday"),
)


async def test_system_calls_that_reach_outside_are_rejected(judged):
    import pyseccomp

    numbers = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in CALLS}
    numbers = {name: number for name, number in numbers.items() if number >= 0}
    assert len(numbers) > 40
    body = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
through = [name for name, number in {numbers}.items()
           if libc.syscall(number, 1, 1, 1, 1, 1, 1) != -1 or ctypes.get_errno() != errno.EPERM]
libc.syscall({pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "clone3")}, 0, 0)
through += [] if ctypes.get_errno() == errno.ENOSYS else ["clone3"]
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    if libc.syscall({pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, "clone")}, flag | 17, 0, 0, 0, 0) != -1:
        through.append(hex(flag))
return 'went through' if not through else through
"""
    assert await tried(judged, body) == "went through"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86_64 has the x32 interface")
async def test_a_call_of_another_interface_kills_the_process(judged):
    reason = await tried(
        judged, f"import ctypes\nctypes.CDLL(None).syscall({0x40000000 + 41}, 2, 1, 0)\nreturn 'went through'"
    )
    assert "was killed by signal" in reason


async def test_no_variable_of_the_service_is_seen(judged, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARK)
    body = (
        f"return 'went through' if {MARK!r} not in str(dict(os.environ)) and len(os.environ) < 12 else dict(os.environ)"
    )
    assert await tried(judged, body) == "went through"


async def test_a_server_on_this_machine_is_not_reached(judged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        await tried(judged, f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        with pytest.raises(TimeoutError):
            server.accept()


LIMITS = {
    "endless": ("while True: pass", {"cpu_s": 1}, "exceeded 1 s of CPU time"),
    "endless in two processes": (
        r"""
os.fork()
while True: pass
""",
        {"cpu_s": 1},
        "exceeded 1 s of CPU time",
    ),
    "sleeping": (
        r"""
import time
time.sleep(60)
""",
        {"wall_s": 1},
        "exceeded 1 s",
    ),
    "waiting for input": ("return os.read(os.pipe()[0], 1)", {"wall_s": 1}, "exceeded 1 s"),
    "ignoring SIGTERM": (
        r"""
import signal, time
[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]
time.sleep(60)
""",
        {"wall_s": 1},
        "exceeded 1 s",
    ),
    "stopping itself": (
        r"""
import signal
os.kill(0, signal.SIGSTOP)
""",
        {"wall_s": 1},
        "exceeded 1 s",
    ),
    "one large allocation": ("bytearray(2 << 30)", {}, "MemoryError"),
    "memory over processes": (
        r"""
import time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1)) * (60 << 20)
        time.sleep(20)
time.sleep(20)
""",
        {"memory_mib": 256},
        "exceeded 256 MiB of memory",
    ),
    "a fork bomb": (
        r"""
while True:
    try: os.fork()
    except OSError: pass
""",
        {"wall_s": 10},
        "exceeded ",
    ),
    "a thread bomb": (
        r"""
import threading, time
for _ in range(500): threading.Thread(target=time.sleep, args=(20,)).start()
""",
        {},
        ("exceeded 32 processes", "can't start new thread"),
    ),
    "a full folder": ("open('/tmp/x', 'wb').write(bytes(100 << 20))", {}, ("File too large", "No space", "exceeded")),
    "many full files": (
        r"""
for n in range(50):
    with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(4 << 20))
""",
        {},
        ("No space left", "exceeded 64 MiB of files"),
    ),
    "many empty files": (
        r"""
for n in range(200_000):
    os.close(os.open(f'/tmp/{n}', os.O_CREAT))
""",
        {},
        "exceeded 64 MiB of files",
    ),
    "a full shared memory": (
        "open('/dev/shm/x', 'wb').write(bytes(100 << 20))",
        {},
        ("No space", "exceeded", "File too"),
    ),
    "many descriptors": ("return [os.pipe() for _ in range(100)]", {}, "Too many open files"),
    "much output": ("while True: os.write(1, bytes(65536))", {}, "exceeded 64 KiB of output"),
    "much output of errors": ("while True: os.write(2, bytes(65536))", {}, "exceeded 64 KiB of output"),
    "a huge value": ("return 'x' * (1 << 24)", {}, "exceeded 64 KiB of output"),
    "a value nested deep": (
        r"""
x = []
for _ in range(10**5): x = [x]
return x
""",
        {},
        "nested more than 60 deep",
    ),
    "deep recursion": (
        r"""
def f(n): return f(n + 1)
return f(0)
""",
        {},
        "RecursionError",
    ),
    "a broken stack": (
        r"""
import threading
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, n): return getattr(self, n + 'x')
A().x
""",
        {},
        ("was killed by signal", "RecursionError", "MemoryError", "exceeded"),
    ),
    "a crash": (
        r"""
import ctypes
ctypes.string_at(0)
""",
        {},
        "was killed by signal 11",
    ),
    "killing all": (
        r"""
import signal
os.kill(-1, signal.SIGKILL)
""",
        {},
        ("ProcessLookupError", "was killed by signal"),
    ),
    "killing its supervisor": (
        r"""
import signal
[os.kill(1, n) for n in range(1, 65) if n not in (32, 33)]
return 1
""",
        {},
        ("got 1", "was killed by signal"),
    ),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_ends_the_program(judged, name):
    body, limits, reasons = LIMITS[name]
    started = time.monotonic()
    reason = await tried(judged, body, **limits)
    assert time.monotonic() - started < 15
    assert any(each in reason for each in ([reasons] if isinstance(reasons, str) else reasons)), reason
    assert left_behind() == []


async def test_a_gigabyte_of_output_is_not_read_into_memory(judged):
    before = psutil.Process().memory_info().rss
    reason = await tried(judged, "for _ in range(1024): os.write(1, bytes(1 << 20))")
    assert "exceeded 64 KiB of output" in reason
    assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_daemons_die_with_their_test(judged):
    body = """
import time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
return 'went through'
"""
    before = everywhere()
    assert await tried(judged, body) == "went through"
    assert everywhere() <= before


async def test_what_a_test_writes_the_next_does_not_find(judged):
    program = """
import os
def solve():
    found = os.listdir('/tmp')
    os.makedirs('/tmp/a/b')
    open('/tmp/c', 'w').close()
    return found
"""
    found = await judged(program, {"asserts": ["assert solve() == []"] * 3})
    assert found.correct, found.reason


async def test_a_folder_without_rights_does_not_stop_later_tests(judged):
    program = "import os\ndef solve():\n    for name in ('/tmp', '/dev/shm'): os.chmod(name, 0)\n    return os.getcwd()"
    found = await judged(program, {"asserts": ["assert solve() == '/tmp'"] * 3})
    assert found.correct, found.reason


async def test_folders_nested_deep_do_not_stop_later_tests(judged):
    program = (
        "import os\ndef solve():\n    for _ in range(3000):\n        os.mkdir('a')\n        os.chdir('a')\n    return 1"
    )
    found = await judged(program, {"asserts": ["assert solve() == 1"] * 2})
    assert found.score == 0.5, found.reason  # the second finds the folder of the first


async def test_a_later_test_runs_after_a_crash(judged):
    program = "import os\ndef solve(n):\n    if n == 1: os.abort()\n    return n"
    found = await judged(program, {"asserts": [f"assert solve({n}) == {n}" for n in range(4)]})
    assert found.score == 0.75
    assert "test 2: was killed by signal 6" in found.reason


async def test_no_folder_or_process_of_a_jail_is_left(isolation, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    await judge("def solve(): return 1", ONE, {}, ProgramLimits())
    assert list(tmp_path.iterdir()) == []
    assert left_behind() == []
