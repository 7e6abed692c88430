"""Owns functions of yours that need network or files: they run in processes that have nothing of ours.

Must not be confused with the sandbox: these processes are not confined. A function may do what its user may do, so give
it a user, or a pod, that may do little. Each text has a process of its own, forked from one that has imported the file.

A function's processes get the variables HOME, LANG, PATH, TMPDIR and TZ, those whose names start with USER_REWARD_, and
the module path. Their output is discarded. Their working folder holds the files beside the recipe.

On Linux with Landlock 6 (kernel 6.12) a text that runs code can neither signal nor inspect the server, the function's
process or other texts; on an older kernel (the server's log says so) it can signal processes of its user. In either
case it can write wherever the function may write, Python packages of its user included, use up memory, disk and process
ids, and call itself correct. Files beside the recipe that it changes are laid out again before the next text; a text
that is judged at the same time may still read the changed ones.
"""
