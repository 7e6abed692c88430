"""Owns a rollout replica without a model: the real pull loop, group worker and weight follower around a stub engine.

Must not be used outside tests and benchmarks. `python -m tests.harness.stubs.rollout --run ID --redis URL`
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rollout.generation import ResponseGenerator
from rollout.service import Replica, RolloutService
from rollout.tasks import GroupWorker
from services.process.hosting import Context, main
from tests.harness.stubs.engine import Answers, StubEngine, StubTokenizer


class StubRollout:
    """One replica, as RolloutService runs it once its engine has started."""

    name = RolloutService.name

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def run(self, context: Context) -> None:
        """Work until `context.stopping` is set, then drain."""
        # The stubs have the methods that the code around them calls, and no others.
        engine: Any = StubEngine(self._answers)
        tokenizer: Any = StubTokenizer(self._answers)
        await context.heartbeat.update(state="joining")
        generator = ResponseGenerator(engine, tokenizer, context.record.recipe.model.max_model_len)
        await Replica(context, engine, GroupWorker(generator)).run()


def answers_of(argv: list[str]) -> tuple[Answers, list[str]]:
    """What the command line says about answers, and the arguments of every service."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in vars(Answers()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    mine, others = parser.parse_known_args(argv)
    return Answers(**vars(mine)), others


if __name__ == "__main__":
    answers, rest = answers_of(sys.argv[1:])
    sys.exit(main(lambda: StubRollout(answers), rest))
