"""What every request passes: FastAPI runs a plain function in a thread, which costs more than most routes do."""

import inspect

from fastapi.routing import APIRoute

from services.api.app import create_app
from tests.harness.api_access import ACCESS

IN_THREADS = {"list_examples", "check_recipe"}
"""Routes that compute for long, and must not stop the loop meanwhile."""


def calls(dependant):
    """What a route calls: itself, and all that it depends on."""
    yield dependant.call
    for inner in dependant.dependencies:
        yield from calls(inner)


def waits(call):
    """Whether FastAPI calls it on the loop."""
    function = call if inspect.isfunction(call) or inspect.ismethod(call) else type(call).__call__
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def test_no_request_is_handed_to_a_thread_on_its_way():
    routes = [route for route in create_app(None, ACCESS).routes if isinstance(route, APIRoute)]
    assert len(routes) > 30
    found = {call.__name__ for route in routes for call in calls(route.dependant) if not waits(call)}
    assert found == IN_THREADS
