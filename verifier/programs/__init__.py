"""Owns the judging of programs that a policy wrote: jails, tests of the usual records, verdicts with partial credit.

Must not run a program, or a record's test code, in the service's own process.

How a test is kept from the program that it judges:

- An assert is divided where it can be (`f(2) == [1, 4]`, `abs(f(2) - 1.41) < 1e-6`; 156 of HumanEval's 164 records,
  most of MBPP): the program's process computes `f(2)` and writes it as plain data; the service compares it outside. So
  does it with output, and with the results of functions. The jail never holds the expected value.
- Any other test code runs in a checker's process in the jail, which has never run a byte of the program. It calls the
  program in another process and gets plain data back, or stand-ins for objects, which equal no value. The checker
  reads its test itself, after the supervisor forked it; the program's process is a copy of the supervisor, which never
  had it.
- Each test has its own processes. All of them are killed before the next test, and at the end of the jail.

What a program can still do:

- See the arguments of its tests, all of them, since they are its input; with few or guessable expected values (True,
  False, 0) it can guess. It can answer by a table of arguments, if it knows the test set from its training.
- Pass a comparison of two of its own results (`assert f(1) == f(2)`), and `assert f(1)`, which expects no more than a
  true value.
- Pass code that compares two objects of its own class: their `__eq__` runs in its process.
- Make its own tests fail or time out; end its checker; fill its share of memory and time until the limits end it, which
  are looked at every 20 ms, so that for one such interval it can exceed those of memory and processes (root only: for
  other users the kernel limits processes at once).
- Read Python's and the system's libraries and this package's folder `inside`; see the version of the kernel and, on
  kernels without Landlock, the hardware in /proc.
- Use what the kernel offers to an unprivileged process without sockets, namespaces, keys, BPF, io_uring and tracing; a
  fault of the kernel there is not excluded.
- Inside of gVisor, whose pod is the jail: read every file that the service's user may read, because gVisor has neither
  Landlock nor a second root folder here. It has no socket and no signal. Give such a pod no secrets.
"""
