"""Owns the command line: `python -m benchmarks.verifier` prints all measurements, or those that are named.

Must not measure; each measurement has a module. Takes some minutes, the attacks most of them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.verifier import attacks, cost, hangs

MEASUREMENTS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "hang": hangs.one_among_64,
    "hangs": lambda: hangs.one_in_a_hundred(6000),
    "verdicts": lambda: cost.verdicts(1024),
    "functions": lambda: cost.functions(1024),
    "attacks": lambda: attacks.measure(300),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MEASUREMENTS], help="all unless given")
    for name in parser.parse_args().names or MEASUREMENTS:
        asyncio.run(MEASUREMENTS[name]())
