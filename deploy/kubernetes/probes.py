"""Owns the HTTP server for the probes of a Ray pod: one path per probe.

Must not check anything itself; the pod's first process passes the checks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = logging.getLogger(__name__)

PORT = 8471
Check = Callable[[], str | None]
"""Why the probe fails, in one line; None when it succeeds."""


class Probes:
    """Serves the probes in `checks`, by path, from a thread: 200, or 503 with the reason."""

    def __init__(self, checks: Mapping[str, Check], port: int = PORT) -> None:
        self._server = ThreadingHTTPServer(("", port), _handler(checks))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def _handler(checks: Mapping[str, Check]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            check = checks.get(self.path)
            problem = f"unknown path: expected one of {', '.join(sorted(checks))}" if check is None else check()
            status = 404 if check is None else 503 if problem else 200
            body = ((problem or "ok") + "\n").encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler
