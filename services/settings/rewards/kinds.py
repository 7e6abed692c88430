"""Owns the kinds of rewards and the options of each, with types and meanings.

Must not judge; the verifier does.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from services.settings.base import Positive, Seconds, Section
from services.settings.faults import invalid

FILE_FUNCTION = re.compile(r"\./(?P<file>[A-Za-z0-9_][A-Za-z0-9_./-]*\.py):(?P<function>[A-Za-z_]\w*)", re.ASCII)
MODULE_FUNCTION = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)", re.ASCII)
FILE_NAME = re.compile(r"\./[A-Za-z0-9_][A-Za-z0-9_./-]*", re.ASCII)
MOST_CHARACTERS = 200
"""Of the name of a file or a function."""
SECRET_PREFIX = "PENSTOCK_REWARD_"
"""The only variables that a recipe may name as a secret: it must not be able to send others to a server of its own."""

SecretName = Annotated[str, Field(pattern=rf"^{SECRET_PREFIX}[A-Z0-9_]{{1,64}}$")]


class NoOptions(Section):
    """A reward without options."""


class MathReward(Section):
    """Mathematical answers, by value. `last_number`: without a box or an answer line, the last number is the answer."""

    last_number: bool = False


class PythonReward(Section):
    """Your function: `./FILE.py:FUNCTION` beside the recipe, or `PACKAGE.MODULE:FUNCTION` of an installed package.

    It runs confined, without network and files, in a process of its own per response. With `needs` it runs outside of
    the confinement, in pods that have nothing of Penstock's.
    """

    function: str
    needs: tuple[Literal["network", "files"], ...] = ()

    @field_validator("function")
    @classmethod
    def _named(cls, function: str) -> str:
        return checked_function(function)

    @property
    def file(self) -> str | None:
        """The name of its file beside the recipe (`./rewards.py`); None for an installed package."""
        return function_file(self.function)


class RemoteReward(Section):
    """What rewards over HTTP share: deadlines and attempts of a request.

    After `attempts` failures the answer is unknown; after `breaker_failures` failed requests in a row none is sent for
    `breaker_s` seconds.
    """

    url: str
    timeout_s: Seconds = 30.0
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    breaker_failures: Positive = 5
    breaker_s: Seconds = 30.0
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        return checked_url(url)

    @property
    def host(self) -> str:
        """The host that requests go to."""
        return str(urlsplit(self.url).hostname)


class HttpReward(RemoteReward):
    """Your service: it gets up to `batch` responses per request, signed with the secret in the variable `secret`."""

    batch: Annotated[int, Field(ge=1, le=256)] = 16
    secret: SecretName | None = None


class JudgeReward(RemoteReward):
    """A judge model behind an OpenAI-compatible API. `rubric`: a file beside the recipe; `key`: a variable's name.

    A response is correct from a score of `threshold`. The run's budget of `max_requests` and `max_tokens` (null: none)
    is shared by its replicas; once it is spent, verdicts are unknown.
    """

    model: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
    rubric: str
    key: SecretName | None = None
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    answer_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_requests: Positive | None = None
    max_tokens: Positive | None = None

    @field_validator("rubric")
    @classmethod
    def _beside_the_recipe(cls, rubric: str) -> str:
        return checked_file("rubric", rubric)


class CodeReward(Section):
    """A program, judged by its tests. The score is the share of tests passed; with `partial` false, all or nothing.

    The limits hold for each program with all its tests: CPU seconds, wall-clock seconds, MiB of memory, processes.
    """

    partial: bool = True
    cpu_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    wall_s: Annotated[float, Field(gt=0, le=7200)] = 30.0
    memory_mib: Annotated[int, Field(ge=64, le=65536)] = 1024
    processes: Annotated[int, Field(ge=1, le=1024)] = 32


KINDS: dict[str, type[Section]] = {
    "math": MathReward,
    "answer-line": NoOptions,
    "pattern": NoOptions,
    "reasoning-gym": NoOptions,
    "python": PythonReward,
    "http": HttpReward,
    "judge": JudgeReward,
    "code": CodeReward,
}
"""By kind: its options. `all`, `any` and `weighted` combine them (services.settings.rewards.reward)."""

SHORT: dict[str, str] = {"python": "function", "http": "url"}
"""The option that a bare text gives: `python: ./rewards.py:score`."""


def checked_function(function: str) -> str:
    """The name of a function. Raises ValueError unless it is `./FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`."""
    expected = "./FILE.py:FUNCTION of a file beside the recipe, or PACKAGE.MODULE:FUNCTION of an installed package"
    in_file, in_module = FILE_FUNCTION.fullmatch(function), MODULE_FUNCTION.fullmatch(function)
    if len(function) > MOST_CHARACTERS or not (in_file or in_module):
        raise ValueError(invalid("function", function, expected))
    if in_file:
        checked_file("function", f"./{in_file['file']}")
    return function


def function_file(function: str) -> str | None:
    """The file that a function's name gives (`./rewards.py`), or None for an installed package."""
    return function.rpartition(":")[0] if function.startswith("./") else None


def checked_file(field: str, name: str) -> str:
    """The name of a file beside the recipe. Raises ValueError if it could be anywhere else."""
    inside = all(part not in ("", ".", "..") for part in name.removeprefix("./").split("/"))
    if len(name) > MOST_CHARACTERS or not FILE_NAME.fullmatch(name) or not inside:
        expected = "./FILE, a path below the recipe's folder of letters, digits, _, - and ."
        raise ValueError(invalid(field, name, expected))
    return name


def checked_url(url: str) -> str:
    """An address of a server. Raises ValueError unless it is http(s), names a host and holds no credentials."""
    expected = "http://HOST[:PORT]/PATH or https://..., without credentials or fragment"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username or parts.password or parts.fragment or len(url) > 2000 or not url.isascii():
        raise ValueError(invalid("url", url, expected))
    return url
