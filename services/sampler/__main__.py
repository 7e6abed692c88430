"""Owns the sampler's command line: `python -m services.sampler --run ID --redis URL`.

Must not contain logic.
"""

import sys

from services.process.hosting import main
from services.sampler.service import SamplerService

if __name__ == "__main__":
    sys.exit(main(SamplerService))
