"""Owns a small OpenAI-compatible server for tests: it answers as a test's function says.

Must not replace any code under test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ChatServer:
    """`answer`: from what is asked (the user message's object) to the content; an int is an error's status.

    `said`: what goes with an error. `json_mode`: whether requests for JSON are taken; `wanted_json` counts them.
    """

    answer: Callable[[dict[str, Any]], str | int]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    said: str = "no"
    json_mode: bool = True
    wanted_json: int = 0
    in_flight: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def problems(self) -> list[str]:
        """The problems that were asked about."""
        return [each["problem"] for each in self.asked]

    def respond(self, document: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        asked = json.loads(document["messages"][-1]["content"])
        with self.lock:
            self.asked.append(asked)
            self.headers.append(headers)
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            self.wanted_json += "response_format" in document
        refused = "response_format" in document and not self.json_mode
        content = 400 if refused else self.answer(asked)
        with self.lock:
            self.in_flight -= 1
        if isinstance(content, int):
            return content, {"error": "no response_format" if refused else self.said}
        return 200, {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}


@contextmanager
def chat_server(answer: Callable[[dict[str, Any]], str | int]) -> Iterator[ChatServer]:
    """The server on a port of its own, until the block ends."""
    chat = ChatServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            if not sent:
                return  # a command that ends cancels its other requests
            body = json.loads(sent)
            assert self.path == "/v1/chat/completions"
            status, document = chat.respond(body, {name.lower(): value for name, value in self.headers.items()})
            content = json.dumps(document).encode()
            with suppress(ConnectionError):  # as above
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    chat.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield chat
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
