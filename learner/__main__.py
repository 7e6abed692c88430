"""Owns `python -m learner --run ID --redis URL`: a learner of one rank, for debugging.

Must not know more ranks; the host starts those.
"""

from learner.ranks import end_with
from learner.service import LearnerService
from services.shell import main

if __name__ == "__main__":
    end_with(lambda: main(LearnerService))
