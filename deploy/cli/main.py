"""Owns the command `penstock` of the full installation: the client's commands, and those that need the platform.

Must not contain a command, nor import anything heavy: `penstock --help` answers within a second.
"""

from __future__ import annotations

from deploy.cli.commands import algorithm, stack
from deploy.cli.commands.bench import bench
from deploy.cli.commands.conformance import conformance
from deploy.cli.commands.doctor import doctor
from deploy.cli.commands.evaluate import EVALUATE_API, evaluate
from deploy.cli.commands.places import places
from deploy.cli.commands.plan import plan
from deploy.cli.commands.recover import recover
from deploy.cli.commands.replay import replay
from deploy.cli.commands.validate import validate
from deploy.cli.common import read_for_submission
from deploy.cli.data import to_integer
from deploy.cli.judging import reward
from deploy.cli.judging.rescore.command import rescore
from deploy.cli.judging.verify import verify
from penstock_client.cli.app import build_app
from penstock_client.cli.connection import with_connection
from penstock_client.cli.reporting import run_command_line
from penstock_client.cli.table import JUDGE, PLATFORM, RECIPES, CliCommand, client_commands

COMMANDS = (
    CliCommand("up", stack.up, PLATFORM),
    CliCommand("demo", stack.demo, PLATFORM),
    CliCommand("doctor", doctor, PLATFORM),
    CliCommand("eval", with_connection(evaluate, EVALUATE_API), PLATFORM),
    CliCommand("recover", recover, PLATFORM),
    CliCommand("places", places, PLATFORM),
    CliCommand("bench", bench, PLATFORM, anything=True),
    CliCommand("validate", validate, RECIPES),
    CliCommand("plan", plan, RECIPES),
    CliCommand("conformance", conformance, RECIPES),
    CliCommand("replay", replay, RECIPES),
    CliCommand("verify", verify, JUDGE),
    CliCommand("rescore", rescore, JUDGE),
)
"""The commands that need the platform; their names are also in penstock_client.cli.table."""
GROUPS = {
    "algorithm": (algorithm.app, RECIPES),
    "reward": (reward.app, JUDGE),
    "data": (to_integer.app, JUDGE),
}

app = build_app((*client_commands(read_for_submission), *COMMANDS), GROUPS)


def main() -> None:
    """The entry point of the command `penstock`."""
    run_command_line(app)


if __name__ == "__main__":
    main()
