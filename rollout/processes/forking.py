"""Owns processes that are forked with their libraries loaded, from a server that loads them while others work.

Must not know the libraries, nor what the processes do.

The server is multiprocessing's, one per process that uses it. It has one thread, and ends with the process that
started it and all that were forked.
"""

from __future__ import annotations

import multiprocessing.forkserver as server
import os
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess


def load_ahead(modules: Sequence[str]) -> None:
    """Start the server, which imports these modules with the environment variables of now; no effect if it runs.

    The import of a module that is missing is left to those that need it.
    """
    server.set_forkserver_preload(["__main__", *modules])
    server.ensure_running()


class ForkedProcess(ForkServerProcess):
    """A process with the environment variables of its starter, not of the server: as they are when it is started."""

    def start(self) -> None:
        """Fork it. Raises OSError if the server has died."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """In the forked process."""
        # Only what differs: a process can change its name, as vLLM's do, while its first variables are where they were.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        super().run()


class ForkedContext(ForkServerContext):
    """A context of multiprocessing whose processes are forked from the server."""

    Process = ForkedProcess
