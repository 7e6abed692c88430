"""Owns access to an API: its address, the token and where it is found, further headers, and the trust in certificates.

Must not send a request, nor show a token or a header's value: no text and no representation has one.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from penstock_client.errors import AccessError

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
MOST_TOKEN_BYTES = 8192
TOKEN = re.compile(r"[!-~]+")
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
HEADER_VALUE = re.compile(r"[ -~]{0,8000}")
PORTS = {"http": 80, "https": 443}


def checked_address(url: str) -> str:
    """The address without a slash at its end. Raises AccessError unless it is http(s)://HOST, without credentials."""
    expected = "expected http://HOST[:PORT] or https://HOST[:PORT], without user, password, query or fragment"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and url.isascii()
    except ValueError:
        raise AccessError(f"--api: not a valid address: {expected}") from None
    if parts.username is not None or parts.password is not None:
        raise AccessError(f"--api: the address has a user or password: {expected}; --header sends credentials")
    if not valid or parts.query or parts.fragment or any(char.isspace() for char in url):
        raise AccessError(f"--api: {url!r} is not valid: {expected}")
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether an address is reachable from this machine only."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def checked_token(token: str, source: str) -> str:
    """The token. Raises AccessError, which names `source`, unless a header can hold it."""
    if not TOKEN.fullmatch(token):
        raise AccessError(f"{source}: not a valid token: expected printable ASCII characters without spaces")
    return token


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers. Raises AccessError for one that HTTP does not allow."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise AccessError("--header: the name is not valid: expected 'Name: value', the name of letters and dashes")
        if not HEADER_VALUE.fullmatch(value):
            raise AccessError(f"--header: the value of {name!r} is not valid: expected printable ASCII characters")
    return dict(headers)


def read_header(text: str) -> tuple[str, str]:
    """Name and value of `Name: value`. Raises AccessError."""
    name, colon, value = text.partition(":")
    if not colon:
        raise AccessError("--header: not valid: expected 'Name: value'")
    [(name, value)] = checked_headers({name.strip(): value.strip()}).items()
    return name, value


def find_token(url: str, token: str | None = None, file: Path | None = None) -> str | None:
    """The token for the API at `url`, None if there is none.

    It is the first of: `token`; the first line of `file`; the variable PENSTOCK_TOKEN; for a loopback address, the file
    that the stack of this machine writes (`stack_token_file`). Raises AccessError.
    """
    if token is not None:
        return checked_token(token, "--token")
    if file is not None:
        return checked_token(_first_line(file, "--token-file"), "--token-file")
    if found := os.environ.get(TOKEN_VARIABLE):
        return checked_token(found, TOKEN_VARIABLE)
    return stack_token(url) if is_loopback(url) else None


def stack_token(url: str) -> str | None:
    """The token of the stack of this machine whose API is at `url`, None if there is none. Raises AccessError."""
    path = stack_token_file(url)
    if not path.exists():
        return None
    _check_private(path)
    return checked_token(_first_line(path, "token file"), f"token file {path}")


def stack_token_file(url: str) -> Path:
    """Where a stack of this machine writes the token of its API: `penstock/token-PORT` in the user's state folder."""
    parts = urlsplit(url)
    return state_folder() / f"token-{parts.port or PORTS[parts.scheme]}"


def state_folder() -> Path:
    """The folder of this user for what commands keep: `penstock` in XDG_STATE_HOME, or in ~/.local/state."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".local" / "state") / "penstock"


def _check_private(path: Path) -> None:
    """Another user could have written a token there, to see what is sent with it, or could read ours."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise AccessError(f"token file: {path} is not valid: expected a regular file, and no link")
    if found.st_uid != os.getuid():
        raise AccessError(f"token file: {path} is not valid: expected a file of yours; user {found.st_uid} owns it")
    if found.st_mode & 0o177:
        mode = stat.S_IMODE(found.st_mode)
        raise AccessError(f"token file: {path} is not valid: expected mode 0600, not {mode:04o}")


def _first_line(path: Path, source: str) -> str:
    try:
        with path.open("rb") as opened:
            text = opened.read(MOST_TOKEN_BYTES).decode("ascii", errors="replace")
    except OSError as error:
        raise AccessError(f"{source}: {str(path)!r} cannot be read ({error.strerror})") from None
    return text.partition("\n")[0].strip()


def trust(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """How servers are checked: against the system's authorities, or only those in `ca`; with a client certificate.

    Raises AccessError for a file that cannot be used.
    """
    if key is not None and cert is None:
        raise AccessError("--key: not valid alone: expected --cert as well")
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise AccessError(f"--ca: {str(ca)!r} is not valid: expected certificates as PEM ({_why(error)})") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            given = f"--cert, --key: {str(cert)!r}, {str(key) if key else None!r}"
            raise AccessError(
                f"{given} are not valid: expected a certificate and its key as PEM ({_why(error)})"
            ) from None
    return context


def no_trust() -> ssl.SSLContext:
    """No check of servers: what answers can read the token and change every answer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _no_password() -> str:
    """Without it, OpenSSL would ask at the terminal."""
    raise AccessError("--key: the key has a password: expected a key without one")


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
