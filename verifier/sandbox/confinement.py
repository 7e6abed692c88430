"""Owns the limits of a warm parent and of its judging processes: system calls, files that may be read, resources.

Must not be reversible: the process that called it can lift none of the limits.

Two layers. seccomp lists the system calls that judging needs and rejects all others (no sockets, no threads, no
signals to other processes, no file opened for writing). A warm parent may fork, and send and receive on the socket
that it has; its judging processes give that up before they read a text. Landlock lists the folders that may be read:
Python, its libraries and what the dynamic linker needs, hence neither /proc nor a mounted secret. pyseccomp asks
libseccomp for the numbers of system calls, which differ between x86_64 and aarch64.
"""

from __future__ import annotations

import errno
import importlib
import os
import resource
import socket
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

MEMORY_BYTES = 4 << 30
MEMORY_SHARE = 4  # the divisor of a container's limit; how many replicas share the container is not known here
ROOM_BYTES = 256 << 20  # the most memory that judging takes, in addition to Python and its libraries
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container reads its own limit: cgroup v2, v1."""
FIRST_VICTIM = 1000
CPU_S = 3600

LIMITS: dict[str, int] = {
    "RLIMIT_CPU": CPU_S,  # for the process's whole life; the clock limits a single judgement
    "RLIMIT_CORE": 0,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
    "RLIMIT_NOFILE": 64,
}

PIPES_AND_FILES = "read write writev readv pread64 lseek close dup dup2 dup3 poll ppoll select pselect6"
FILE_NAMES = "stat lstat fstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents64 getcwd"
MEMORY = "brk mmap munmap mremap mprotect madvise futex set_robust_list rseq membarrier"
SIGNALS = "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall alarm setitimer getitimer"
CLOCKS = "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times"
IDENTITY = (
    "getrusage getrandom getpid getppid gettid getuid geteuid getgid getegid uname sysinfo getrlimit "
    "sched_getaffinity sched_yield getcpu exit exit_group"
)
ALLOWED = " ".join((PIPES_AND_FILES, FILE_NAMES, MEMORY, SIGNALS, CLOCKS, IDENTITY)).split()
"""System calls that reach nothing outside the process, with any arguments."""

HARMLESS_FCNTL = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC

FORKING = ["wait4", "pidfd_open", "sendmsg", "recvmsg", "seccomp"]
"""What a warm parent needs besides: to start judging processes, to reap them, and to confine them further."""

FORK_FLAGS = 0x200000 | 0x1000000 | 0xFF  # CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID, the signal: what fork() sets
CLONE_FLAGS = 0xFFFFFFFF
WARM_PRCTL = (1, 22, 38)  # PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS

DROPPED_CALLS = (*FORKING, "clone", "prctl")
"""What a judging process drops: with these and its limits it has what ALLOWED says, and no more."""

ABSENT = ("clone3", "openat2")
"""Rejected as by an older kernel: their arguments are in memory, where a filter does not see them."""

SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom")


class ConfinementError(Exception):
    """A judging process cannot be confined, so it must not judge."""


def confine() -> list[str]:
    """Drop every permission that a warm parent does not need; returns the gaps of this platform, one sentence each.

    Call it after the libraries of its verifier are loaded and before the first untrusted byte. Raises ConfinementError
    when a Linux process is not confined: libseccomp is missing, a second thread runs, or a forbidden call succeeded.
    """
    if sys.platform != "linux":
        return [f"{sys.platform} has no seccomp: a judged text that runs code has all permissions of this user"]
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:  # Landlock restricts the calling thread only
        raise ConfinementError(f"threads in the judging process: {threads} is not valid: expected 1")
    seccomp = _libseccomp()  # found by running ldconfig, which the limits below forbid
    limits = LIMITS | {"RLIMIT_AS": memory_bytes()}
    # When memory runs out, the kernel kills this process before its parent.
    Path("/proc/self/oom_score_adj").write_text(str(FIRST_VICTIM))
    gaps = _restrict_files()
    for name, value in limits.items():
        _lower(getattr(resource, name), value)
    _filter_calls(seccomp)
    _verify(files=not gaps)
    return gaps


def memory_bytes() -> int:
    """The address space of this process in bytes.

    4 GiB, in a container at most a quarter of its limit, but at least 256 MiB more than it uses now.
    """
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    found = [Path(path).read_text().strip() for path in MEMORY_LIMITS if os.path.exists(path)]
    shares = [int(limit) // MEMORY_SHARE for limit in found if limit != "max"]
    return max(min(MEMORY_BYTES, *shares), taken + ROOM_BYTES) if shares else MEMORY_BYTES


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (bound, bound))


def readable() -> list[Path]:
    """The existing paths that a judging process may read: Python, its libraries, this package, system libraries."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)}
    folders |= {Path(entry) for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}}
    folders |= {Path(__file__).resolve().parent}
    return [path for path in (*sorted(folders), *map(Path, SYSTEM_FOLDERS + SYSTEM_FILES)) if os.path.exists(path)]


def _restrict_files() -> list[str]:
    from landlockpy import AccessFS, LandlockError, Ruleset, Scope

    try:
        with Ruleset(scoped=Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET) as rules:
            for path in readable():
                rules.allow_path(path, AccessFS.READ_FILE | (AccessFS.READ_DIR if path.is_dir() else AccessFS.NONE))
            rules.restrict()
    except LandlockError as error:
        files = f"every file that user {os.getuid()} may read, including the environment of its processes"
        return [f"Landlock is not available ({error.strerror}): a judged text that runs code can read {files}"]
    return []


def _libseccomp() -> ModuleType:
    try:
        return importlib.import_module("pyseccomp")
    except RuntimeError as error:  # pyseccomp's, for a missing libseccomp.so.2
        raise ConfinementError(f"{error}; install it (Debian's package libseccomp2)") from None


def _filter_calls(seccomp: ModuleType) -> None:
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    rules.set_attr(seccomp.Attr.CTL_TSYNC, 1)

    def add(action: int, name: str, *arguments: object) -> None:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # otherwise this architecture lacks the call
            rules.add_rule(action, number, *arguments)

    def equal(at: int, value: int) -> object:
        return seccomp.Arg(at, seccomp.EQ, value)

    for name in ALLOWED:
        add(seccomp.ALLOW, name)
    for name in ABSENT:
        add(seccomp.ERRNO(errno.ENOSYS), name)
    add(seccomp.ERRNO(errno.ENOTTY), "ioctl")  # Python reads this as "no terminal"
    writing = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
    add(seccomp.ALLOW, "openat", seccomp.Arg(2, seccomp.MASKED_EQ, writing, os.O_RDONLY))
    for command in HARMLESS_FCNTL:  # other commands can make the kernel send signals to any process
        add(seccomp.ALLOW, "fcntl", equal(1, command))
    for name in FORKING:
        add(seccomp.ALLOW, name)
    add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_FLAGS & ~FORK_FLAGS, 0))
    for option in WARM_PRCTL:
        add(seccomp.ALLOW, "prctl", equal(0, option))
    add(seccomp.ALLOW, "prlimit64", equal(0, 0))  # its own limits, which it can only lower
    rules.load()


def confine_further() -> Callable[[], None]:
    """What a judging process calls before its first text: it takes back what the warm parent may do.

    Prepared by the warm parent, because it takes longer than a fork. Raises ConfinementError in a process that can
    still start another one.
    """
    if sys.platform != "linux":
        return lambda: None
    seccomp = _libseccomp()
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in DROPPED_CALLS:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        rules.add_rule(seccomp.ERRNO(errno.EPERM), number)
    limits = seccomp.resolve_syscall(seccomp.Arch.NATIVE, "prlimit64")
    rules.add_rule(seccomp.ERRNO(errno.EPERM), limits, seccomp.Arg(2, seccomp.NE, 0))

    def confine_child() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # not enforced for root; the filter holds for every user
        rules.load()
        if outcome := _attempted(os.fork):
            raise ConfinementError(f"confinement failed: the judging process tried to fork, and it {outcome}")

    return confine_child


FORBIDDEN: dict[str, Callable[[], object]] = {
    "a TCP socket": lambda: socket.socket(socket.AF_INET),
    "a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "execve": lambda: os.execv("/nonexistent", ["/nonexistent"]),
    "a signal to the parent": lambda: os.kill(os.getppid(), 0),
    "a file open for writing": lambda: os.open("/dev/null", os.O_WRONLY),
}


def _verify(files: bool) -> None:
    attempts = FORBIDDEN | ({"/proc": lambda: os.open("/proc/self/environ", os.O_RDONLY)} if files else {})
    for name, attempt in attempts.items():
        if outcome := _attempted(attempt):
            raise ConfinementError(f"confinement failed: the judging process tried {name}, and it {outcome}")


def _attempted(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except PermissionError:
        return ""
    except OSError as error:
        return f"failed only with: {error.strerror}"
    return "succeeded"
