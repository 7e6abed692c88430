"""Owns the command that writes the dashboards: `python -m deploy.observability [--check]`.

Must not talk to a Grafana.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.observability.dashboards import BOARDS
from deploy.observability.panels import render

FOLDER = Path(__file__).parents[2] / "helm" / "penstock" / "files" / "dashboards"


def files() -> dict[Path, str]:
    """Every dashboard's file and its content."""
    return {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS}


def main(argv: list[str] | None = None) -> int:
    """Write the dashboards, or with --check print those that differ; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.observability")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args(argv).check
    wanted = files()
    extra = sorted(set(FOLDER.glob("*.json")) - set(wanted))
    wrong = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    if check:
        for path in (*wrong, *extra):
            print(f"{path.name} differs from the generated file; run python -m deploy.observability")
        return 1 if wrong or extra else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in wrong:
        path.write_text(wanted[path])
        print(f"wrote {path.name}")
    for path in extra:
        path.unlink()
        print(f"removed {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
