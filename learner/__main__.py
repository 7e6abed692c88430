"""Owns `python -m learner --run ID --redis URL`: a learner of one rank, for debugging.

Must not start more ranks; the host does.
"""

from learner.service import LearnerService
from learner.training.process_group import end_with
from services.process.hosting import main

if __name__ == "__main__":
    end_with(lambda: main(LearnerService))
