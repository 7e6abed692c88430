"""Owns the tracker's command line: `python -m services.tracking --run ID --redis URL`.

Must not contain logic.
"""

import sys

from services.process.hosting import main
from services.process.teardown import exit_now
from services.tracking.service import TrackerService

if __name__ == "__main__":
    service = TrackerService()
    status = main(lambda: service)
    if service.hangs:
        exit_now(status)  # a call that hangs would keep the process alive
    sys.exit(status)
