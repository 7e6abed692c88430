"""Owns `python -m learner --run ID --redis URL`: a learner of one rank, for debugging.

Must not know more ranks; the host starts those.
"""

import sys

from learner.service import LearnerService
from services.shell import main

if __name__ == "__main__":
    sys.exit(main(LearnerService))
