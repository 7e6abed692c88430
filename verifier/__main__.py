"""Owns the verifier's command line: `python -m verifier --run ID --redis URL`.

Must not contain logic.
"""

import sys

from services.process.hosting import main
from verifier.service import VerifierService

if __name__ == "__main__":  # spawned judging processes import this module again
    sys.exit(main(VerifierService))
