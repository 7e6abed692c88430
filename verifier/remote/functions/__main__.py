"""Owns the program of the functions' server: `python -m verifier.remote.functions --listen unix:PATH|HOST:PORT`.

Must not keep what a function's process could read. The shared secret comes from the variable PENSTOCK_FUNCTIONS_SECRET
or the file that PENSTOCK_FUNCTIONS_SECRET_FILE names. The program then replaces itself by one that gets the secret on a
pipe and only the variables that functions may have, because /proc shows the variables that a program started with. A
function can read a file with the secret if this user can; so the variable is better.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from pydantic import SecretStr

from services.settings.faults import invalid
from verifier.processes.prctl import deny_inspection, die_with
from verifier.remote.functions.app import create_functions_app
from verifier.remote.functions.crew import Crew
from verifier.remote.functions.place import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    on_pipe,
    secret_in_file,
    secret_on_pipe,
)
from verifier.remote.functions.warm import user_environment
from verifier.remote.signature import secret_from

UNIX = "unix:"
DRAIN_S = 3


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m verifier.remote.functions", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="unix:PATH|HOST:PORT")
    parser.add_argument("--processes", type=int, help="texts judged at once; default: four per core")
    parser.add_argument("--folder", help="where files of functions are laid out; default: the temporary folder")
    parser.add_argument("--parent", type=int, help="a process id: end with that process")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        place = _place(arguments.listen)
        secret = _secret()
        if not on_pipe(os.environ):
            _replace(secret)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    deny_inspection()
    tempfile.tempdir = arguments.folder  # of this program; functions get TMPDIR as it is
    if arguments.parent is not None:
        die_with(arguments.parent)
    crew = Crew(processes=arguments.processes) if arguments.processes else Crew()
    app = create_functions_app(crew, secret)
    # asyncio's loop: a function's process is started by a thread of which it must know the end.
    config = uvicorn.Config(app, loop="asyncio", log_level="warning", timeout_graceful_shutdown=DRAIN_S, **place)
    uvicorn.Server(config).run()
    return 0


def _secret() -> SecretStr:
    if SECRET_VARIABLE not in os.environ and (path := os.environ.get(SECRET_FILE_VARIABLE)):
        return secret_in_file(Path(path))
    return secret_from(os.environ, "functions", SECRET_VARIABLE)


def _replace(secret: SecretStr) -> NoReturn:
    """Run this program again in this process, without the variables that functions may not have."""
    descriptor, variables = secret_on_pipe(secret)
    os.set_inheritable(descriptor, True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], user_environment(os.environ) | variables)


def _place(listen: str) -> dict[str, Any]:
    """uvicorn's settings for an address. Raises ValueError."""
    if listen.startswith(UNIX) and len(listen) > len(UNIX):
        return {"uds": listen.removeprefix(UNIX)}
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(invalid("--listen", listen, "unix:PATH or HOST:PORT"))
    return {"host": host.strip("[]"), "port": int(port)}


if __name__ == "__main__":
    sys.exit(main())
