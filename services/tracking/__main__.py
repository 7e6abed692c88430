"""Owns the tracker's command line: `python -m services.tracking --run ID --redis URL`.

Must not contain logic.
"""

import sys

from services.process import main
from services.tracking.service import TrackerService, exit_process

if __name__ == "__main__":
    service = TrackerService()
    status = main(lambda: service)
    if service.hangs:
        exit_process(status)
    sys.exit(status)
