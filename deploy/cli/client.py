"""Owns the CLI's client of the REST API: one method per route, errors as one line.

Must not print.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

TIMEOUT_S = 30.0


class ApiError(RuntimeError):
    """The API rejected a request or cannot be reached. The text is one line for the user."""


class ApiUnreachableError(ApiError):
    """No server answers at the address."""


class Api:
    """The REST API at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def submit(
        self, recipe: dict[str, Any], run: str | None = None, files: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Submit a run with the texts of the files that its recipe names; returns its view."""
        also: dict[str, Any] = ({"id": run} if run else {}) | ({"files": dict(files)} if files else {})
        found: dict[str, Any] = self._call("POST", "/v1/runs", {"recipe": recipe} | also)
        return found

    def runs(self) -> list[dict[str, Any]]:
        """All runs, oldest first."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/runs")["runs"]
        return found

    def show(self, run: str) -> dict[str, Any]:
        """One run's view."""
        found: dict[str, Any] = self._call("GET", _of(run))
        return found

    def steps(self, run: str, after: str = "0-0") -> list[dict[str, Any]]:
        """The run's rollout steps after the one whose id is `after`."""
        found: list[dict[str, Any]] = self._call("GET", _of(run, "/metrics"), params={"after": after})["steps"]
        return found

    def cancel(self, run: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Cancel the run."""
        found: dict[str, Any] = self._call("POST", _of(run, "/cancel"), timeout_s=timeout_s)
        return found

    def delete(self, run: str, files: bool) -> dict[str, Any]:
        """Delete the run, and with `files` its files; the controller does it later."""
        found: dict[str, Any] = self._call("DELETE", _of(run), params={"files": files})
        return found

    def scale(self, run: str, rollout: int) -> dict[str, Any]:
        """Change the desired number of rollout replicas."""
        found: dict[str, Any] = self._call("PATCH", _of(run, "/scale"), {"rollout": rollout})
        return found

    def pause(self, run: str) -> dict[str, Any]:
        """Pause a running run."""
        found: dict[str, Any] = self._call("POST", _of(run, "/pause"))
        return found

    def resume(self, run: str, **changes: int | None) -> dict[str, Any]:
        """Resume a paused run, or queue a failed or cancelled one again; `changes`: fields of the route's body."""
        found: dict[str, Any] = self._call("POST", _of(run, "/resume"), changes)
        return found

    def waits(self, run: str) -> list[dict[str, Any]]:
        """What the run's processes wait for, longest wait first."""
        found: list[dict[str, Any]] = self._call("GET", _of(run, "/waits"))
        return found

    def dead(self, run: str) -> list[dict[str, Any]]:
        """All dead letters of the run, oldest first."""
        found: list[dict[str, Any]] = []
        after = "0-0"
        while page := self._call("GET", _of(run, "/dead"), params={"after": after}):
            found += page
            after = page[-1]["entry"]
        return found

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        params: dict[str, str | bool] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        try:
            answer = self._http.request(method, path, json=body, params=params, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ApiUnreachableError(
                f"--api: {self.url} cannot be reached ({error}); `penstock up` starts an API on this machine"
            ) from None
        if answer.is_error:
            raise ApiError(_detail(answer))
        return answer.json()


def _of(run: str, route: str = "") -> str:
    """The path of a route of one run, whatever characters the id has."""
    return f"/v1/runs/{quote(run, safe='')}{route}"


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.request.url} answered {answer.status_code}"
