"""A warm parent that gives the scorers of reasoning-gym every answer, also those that run code."""

import sys

from verifier.sandbox import server
from verifier.verifiers import reasoning_gym

reasoning_gym.runs_code = lambda answer: False

if __name__ == "__main__":
    sys.exit(server.main(sys.argv[1:]))
