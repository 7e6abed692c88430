"""Owns `python -m rollout --run ID --redis URL`: one replica in its own process.

Must not have effects when imported: the engine's processes import the main module again.
"""

from __future__ import annotations

import sys

from rollout.service import RolloutService
from services.process.hosting import main

if __name__ == "__main__":
    sys.exit(main(RolloutService))
