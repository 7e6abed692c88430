"""Owns the outage of the S3 store: its moment, its strike, and when what was owed is stored.

Must not damage an object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.chaos import lookups
from tests.chaos.scene import Moment, Scene
from tests.chaos.strikes import Struck, struck_now
from tests.harness.servers.s3_server import S3Server

SHORTEST_S, LONGEST_S = 5.0, 12.0
"""The learner tries again every 2 s: an outage outlasts several attempts."""
EFFECT_S = 60.0
"""How long an outage lasts if the learner does not need the store."""
WAIT = "store"
ENDING_S = 10.0


class Refusals:
    """A server in place of the store that answers every request with 503; `count`: so many."""

    def __init__(self, port: int) -> None:
        self.count = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                """Refuse whatever is asked."""
                self.close_connection = True
                self.raw_requestline = self.rfile.readline(65537)
                if self.raw_requestline and self.parse_request():
                    outer.count += 1
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *given: object) -> None:
                """Discard the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="refusals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._thread.join(ENDING_S)
        self._server.server_close()


def storing(scene: Scene) -> Moment | None:
    """The store while an uncommitted batch is in flight, which has to be archived."""
    batch = lookups.batch_in_flight(scene.server, scene.run) if scene.ground.store else None
    if batch is None or batch[1] >= scene.recipe["limits"]["rollout_steps"]:
        return None
    return Moment(None, None, batch=batch[1])


def take_away(scene: Scene, moment: Moment) -> Struck | None:
    """Kill the store, hang it, or let it refuse every request, until the learner has waited for it for a while."""
    store = scene.ground.store
    if store is None or not scene.outage.acquire(blocking=False):
        return None
    how = scene.rng.choice(sorted(WAYS))
    seconds = scene.rng.uniform(SHORTEST_S, LONGEST_S)
    struck = struck_now(scene, moment, facts={"how": how, "away_s": seconds})
    back = WAYS[how](store)
    begun, waited = time.monotonic(), threading.Event()

    def due() -> bool:
        if waits_for_store(scene):
            waited.set()
        away_s = time.monotonic() - begun
        return away_s >= EFFECT_S or (waited.is_set() and away_s >= seconds)

    def release() -> None:
        back()
        scene.outage.release()

    struck.due, struck.release, struck.had_effect = due, release, waited.is_set
    return struck


def waits_for_store(scene: Scene) -> bool:
    """Whether a process announces that it waits for the store."""
    found = lookups.processes(scene.server, scene.run, "learner")
    return any(WAIT in process.waits for process in found)


def _killed(store: S3Server) -> Callable[[], None]:
    store.kill()
    return store.start


def _hung(store: S3Server) -> Callable[[], None]:
    store.hang()
    return store.resume


def _refusing(store: S3Server) -> Callable[[], None]:
    store.kill()
    refusals = Refusals(store.port)

    def back() -> None:
        refusals.close()
        store.start()

    return back


WAYS: dict[str, Callable[[S3Server], Callable[[], None]]] = {
    "killed": _killed,
    "hung": _hung,
    "refusing": _refusing,
}
"""How a store goes away; each returns what brings it back."""


def stored(scene: Scene, struck: Struck) -> bool:
    """The record of the step that was in flight is in the store, and a later step is committed."""
    step = struck.moment.batch or 0
    return scene.step() > step and any((scene.files / "records").glob(f"step-{step:06d}.*json"))
