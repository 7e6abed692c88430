"""Owns the replacement of Ray's head process in tests of its supervisor: an API that is always ready.

Must not be used in tests that need Ray.

Files in the runs folder control it: it reports failure once `fail` exists, and dies after it was ready if `die` exists;
each line of `early-deaths` makes it die once before it is ready.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Ready(BaseHTTPRequestHandler):
    """Answers every request with 200."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Log nothing."""


def say(phase, text=""):
    print(json.dumps({"phase": phase, "text": text}), flush=True)


def main():
    runs = Path(os.environ["PENSTOCK_RUNS"])
    server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready)
    say("ray", "starting Ray")
    early_deaths = runs / "early-deaths"
    if early_deaths.exists() and (left := early_deaths.read_text().splitlines()):
        early_deaths.write_text("\n".join(left[1:]))
        sys.exit(1)
    if not (runs / "fail").exists():
        say("ready")
    # A test may end this process as soon as it answers; by then it has reported all phases.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not (runs / "fail").exists():
        if (runs / "die").exists():
            sys.exit(3)
        time.sleep(0.1)
    say("failed", "the gateway is broken")
    sys.exit(1)


if __name__ == "__main__":
    main()
