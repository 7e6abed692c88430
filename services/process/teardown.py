"""Owns the end of a process that skips Python's teardown.

Must not import a library: tests on GPUs run where few are installed.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def exit_now(status: int) -> NoReturn:
    """End this process with what it has logged and printed, without tearing Python down.

    Native threads of a library that outlive its objects may crash or abort the interpreter in a teardown.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
