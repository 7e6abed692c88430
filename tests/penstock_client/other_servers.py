"""Owns servers that are not Penstock's API: what a proxy, a wrong address or a broken server answers.

Must not be used where the gateway itself can answer.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

METHODS = ("GET", "POST", "PATCH", "PUT", "DELETE")


@dataclass
class OtherServer:
    """A server on this machine; `requests`: method, path and headers of each one, headers in lower case."""

    url: str
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


Respond = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, kind: str, body: str, **headers: str) -> Respond:
    """What answers every request like this."""

    def respond(request: BaseHTTPRequestHandler) -> None:
        content = body.encode()
        request.send_response(status)
        request.send_header("content-type", kind)
        request.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return respond


@contextmanager
def other_server(respond: Respond, certificates: Path | None = None) -> Iterator[OtherServer]:
    """A server that answers with `respond`; with `certificates` (a folder with tls.crt and tls.key) over TLS."""
    found = OtherServer("")

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            found.requests.append((self.command, self.path, headers))
            respond(self)

        def log_message(self, *_: object) -> None:
            pass

    for method in METHODS:
        setattr(Handler, f"do_{method}", Handler._serve)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that goes away
        found.url = f"http{'s' if certificates else ''}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join(20)


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
