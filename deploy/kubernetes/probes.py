"""Owns the probes of a Ray pod: an HTTP page for each question that Kubernetes asks.

Must not answer a question itself; the pod's first process does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = logging.getLogger(__name__)

PORT = 8471
Answer = Callable[[], str | None]
"""What stands against the probe, in one line; None when nothing does."""


class Probes:
    """Serves `answers` by path from a thread: 200, or 503 with what stands against it."""

    def __init__(self, answers: Mapping[str, Answer], port: int = PORT) -> None:
        self._server = ThreadingHTTPServer(("", port), _handler(answers))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(answers: Mapping[str, Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            answer = answers.get(self.path)
            against = f"unknown; {', '.join(sorted(answers))} are served" if answer is None else answer()
            status = 404 if answer is None else 503 if against else 200
            body = ((against or "ok") + "\n").encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
