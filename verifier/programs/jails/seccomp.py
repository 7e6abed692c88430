"""Owns the filter of a program's system calls, as a BPF program that a process without libraries can load.

Must not need a kernel feature that gVisor lacks: the filter is the only confinement of calls there.

A list of what is denied, unlike verifier/sandbox/confinement.py: a program may start processes and threads and write
files, and libraries differ in the calls that they make for it. Namespaces, mounts and limits hold what is allowed.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import tempfile
from functools import cache
from typing import Any

NAMESPACES = 0x7E020080
"""CLONE_NEW*: user, mount, PID, network, IPC, UTS, cgroup, time."""
SHARED_ANONYMOUS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
AF_UNIX = 1

SOCKETS = "socket connect bind listen accept accept4 sendmmsg recvmmsg"
OTHER_PROCESSES = (
    "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd "
    "pidfd_send_signal setpriority ioprio_set migrate_pages move_pages set_mempolicy mbind sched_setscheduler "
    "sched_setparam sched_setattr sched_setaffinity"
)
NAMESPACES_AND_MOUNTS = (
    "unshare setns mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr "
    "open_by_handle_at name_to_handle_at quotactl quotactl_fd swapon swapoff fanotify_init fanotify_mark"
)
KERNEL = (
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot syslog acct personality modify_ldt iopl "
    "ioperm settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup lookup_dcookie "
    "nfsservctl uselib ustat sysfs vm86 vm86old seccomp landlock_create_ruleset landlock_add_rule "
    "landlock_restrict_self lsm_set_self_attr memfd_secret map_shadow_stack"
)
MEMORY_OUTSIDE_OF_PROCESSES = (
    "memfd_create shmget shmat shmctl msgget msgsnd msgrcv semget semop semtimedop mq_open remap_file_pages "
    "vmsplice tee"
)
IDENTITY = "setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset"
DENIED = " ".join(
    (SOCKETS, OTHER_PROCESSES, NAMESPACES_AND_MOUNTS, KERNEL, MEMORY_OUTSIDE_OF_PROCESSES, IDENTITY)
).split()
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Denied where other processes than the program's are visible to it, and have the same user."""
ABSENT = ("clone3", "openat2")
"""Rejected as by an older kernel: their arguments are in memory, where a filter does not see them."""


class FilterError(Exception):
    """This system cannot make the filter."""


@cache
def filter_program(signals: bool) -> bytes:
    """The BPF program of this architecture; `signals`: allow sending signals. Raises FilterError.

    What it denies fails with EPERM; a call of another architecture's interface kills the process.
    """
    try:
        seccomp = importlib.import_module("pyseccomp")
    except RuntimeError as error:  # pyseccomp's, for a missing libseccomp.so.2
        raise FilterError(f"{error}; install it (Debian's package libseccomp2)") from None
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    denied = seccomp.ERRNO(errno.EPERM)

    def deny(name: str, *arguments: Any, action: Any = denied) -> None:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # otherwise this architecture or libseccomp lacks the call
            rules.add_rule(action, number, *arguments)

    for name in [*DENIED, *([] if signals else SIGNALS)]:
        deny(name)
    for name in ABSENT:
        deny(name, action=seccomp.ERRNO(errno.ENOSYS))
    for bit in range(32):
        if NAMESPACES >> bit & 1:
            deny("clone", seccomp.Arg(0, seccomp.MASKED_EQ, 1 << bit, 1 << bit))
    deny("socketpair", seccomp.Arg(0, seccomp.NE, AF_UNIX))
    deny("prlimit64", seccomp.Arg(0, seccomp.NE, 0))
    # Its pages would be in no process's count once it unmapped them.
    deny("mmap", seccomp.Arg(3, seccomp.MASKED_EQ, SHARED_ANONYMOUS, SHARED_ANONYMOUS))
    deny("ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, 0x5412))  # TIOCSTI types into a terminal
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
