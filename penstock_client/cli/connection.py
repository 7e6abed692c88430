"""Owns the options with which every command connects to an API, and the client that they describe.

Must not import anything heavy at module level: `penstock --help` answers within a second.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from penstock_client.cli.reporting import reported, warn

if TYPE_CHECKING:
    from penstock_client.client import Client

HOST, PORT = "127.0.0.1", 8470
DEFAULT_API = f"http://{HOST}:{PORT}"
PANEL = "Connection"
INSECURE = (
    "--insecure: THE CERTIFICATE OF THE SERVER IS NOT CHECKED; "
    "whatever answers can read the token and change every answer"
)


@dataclass(frozen=True)
class ApiConnection:
    """How to connect to an API: the values of the options below."""

    api: str | None = DEFAULT_API
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    header: tuple[str, ...] = field(default=(), repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False

    def open(self) -> Client:
        """A client; use it as a context manager. Raises AccessError."""
        from penstock_client.access import checked_address, find_token, is_loopback, no_trust, read_header, trust
        from penstock_client.client import Client

        url = checked_address(self.api or DEFAULT_API)
        token = find_token(url, self.token, self.token_file)
        encrypted = urlsplit(url).scheme == "https"
        if self.insecure:
            warn(INSECURE)
        if token is not None and not encrypted and not is_loopback(url):
            warn(f"the token is sent to {url} unencrypted: expected https")
        verify = no_trust() if self.insecure else trust(self.ca, self.cert, self.key) if encrypted else True
        return Client(url, token=token, headers=dict(map(read_header, self.header)), verify=verify)


ApiOption = Annotated[
    str | None,
    typer.Option("--api", envvar="PENSTOCK_API", help="Address of the REST API.", rich_help_panel=PANEL),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Token for the API. Other users of this machine can see it: prefer PENSTOCK_TOKEN or --token-file. "
        "Default: PENSTOCK_TOKEN, or the token of the stack on this machine.",
        rich_help_panel=PANEL,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="PENSTOCK_TOKEN_FILE",
        metavar="FILE",
        help="File with the token in its first line.",
        rich_help_panel=PANEL,
    ),
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="'NAME: VALUE'",
        help="Header for every request, such as a proxy's; may be repeated.",
        rich_help_panel=PANEL,
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="PENSTOCK_CA",
        metavar="FILE",
        help="Certificates (PEM) of the only authorities to trust; default: the system's.",
        rich_help_panel=PANEL,
    ),
]
CertOption = Annotated[
    Path | None,
    typer.Option("--cert", metavar="FILE", help="Client certificate (PEM).", rich_help_panel=PANEL),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Key of the client certificate (PEM).", rich_help_panel=PANEL),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Do not check the server's certificate. Dangerous.", rich_help_panel=PANEL),
]


def _connection(
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    header: HeaderOption = None,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    insecure: InsecureOption = False,
) -> ApiConnection:
    """The connection that the options describe."""
    return ApiConnection(api, token, token_file, tuple(header or ()), ca, cert, key, insecure)


OPTIONS = tuple(inspect.signature(_connection, eval_str=True).parameters.values())
SUBSTITUTES = {"Client": object, "ApiConnection": ApiConnection}
"""For annotations of commands, which import the client only when they run."""


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a connection in place of its parameter `client`, whose errors are one line."""

    def call(connection: ApiConnection, **given: Any) -> None:
        with reported(), connection.open() as client:
            command(client=client, **given)

    return _with_options(command, call, "client", OPTIONS)


def with_connection(command: Callable[..., None], api: str = "Address of a REST API.") -> Callable[..., None]:
    """The command with the options in place of its parameter `connection`; without --api, its `api` is None.

    `api`: the help of --api.
    """
    optional = Annotated[str | None, typer.Option("--api", metavar="URL", help=api, rich_help_panel=PANEL)]
    options = tuple(
        option.replace(annotation=optional, default=None) if option.name == "api" else option for option in OPTIONS
    )
    return _with_options(command, command, "connection", options)


def _with_options(
    command: Callable[..., None],
    call: Callable[..., None],
    replaced: str,
    options: tuple[inspect.Parameter, ...],
) -> Callable[..., None]:
    """A function with the parameters of `command` and `options`, except `replaced`; it calls `call`."""
    own = inspect.signature(command, locals=SUBSTITUTES, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [*(parameter for parameter in own if parameter.name != replaced), *options]
    names = {option.name for option in options}

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        connection = _connection(**{name: given.pop(name) for name in names})
        call(connection=connection, **given)

    # Typer reads both.
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=keyword) for parameter in parameters]
    )
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_options.__wrapped__
    return with_options
