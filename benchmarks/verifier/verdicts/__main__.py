"""Owns the command line: `python -m benchmarks.verifier.verdicts FOLDER` prints the tables on the data in a folder.

Must not download: the folder holds math500.jsonl, aime24.jsonl, gsm8k_test.jsonl and, if wanted,
example_model_solutions.jsonl (openai/grade-school-math). A file that is not there is named and left out. Takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.verifier.verdicts import golds, solutions, speed

TABLES: tuple[tuple[str, Callable[[Path], Iterator[str]]], ...] = (
    ("math500.jsonl", golds.table),
    ("aime24.jsonl", golds.table),
    ("gsm8k_test.jsonl", golds.table),
    ("example_model_solutions.jsonl", solutions.table),
    ("math500.jsonl", speed.table),
    ("gsm8k_test.jsonl", speed.table),
)


def main(folder: Path) -> None:
    """Print each table whose file is there."""
    for name, table in TABLES:
        path = folder / name
        for line in table(path) if path.exists() else (f"{name}: not in {folder}, left out",):
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier.verdicts", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the data is")
    main(parser.parse_args().folder)
