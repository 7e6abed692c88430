"""Owns the HTTP interface of the functions' server.

Must not read a request further than it is signed with the shared secret; only `GET /healthz` is open.

    PUT /files/DIGEST   a file's content, at most 8 MiB; DIGEST is its SHA-256
    POST /judge         {"function": "./rewards.py:score", "files": {"./rewards.py": DIGEST}, "cpu_s": 10, "wall_s": 30,
                        "requests": [...]}, with requests as in verifier.remote.protocol

`POST /judge` answers {"missing": [DIGEST, ...]} if it lacks files, else {"results": [...]} in the requests' order. A
replayed request does no harm: it stores the same file or judges the same texts again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationError

from services.settings.rewards.kinds import checked_file, checked_function
from verifier.remote.faults import one_line
from verifier.remote.functions.crew import Crew, CrewBusyError
from verifier.remote.functions.files import FILE_BYTES, digest_of
from verifier.remote.functions.warm import TextLimits
from verifier.remote.signature import SIGNATURE_HEADER, RequestSignatureError, check_signature

BODY_BYTES = 32 << 20
MOST_FILES = 64
MOST_REQUESTS = 256
BUSY_S = 2
ERROR_CHARACTERS = 500

FileName = Annotated[str, AfterValidator(lambda name: checked_file("files", name))]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TextRequest(BaseModel):
    """One text to judge."""

    id: str
    prompt: list[dict[str, Any]]
    response: str
    reference: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class FunctionRequest(BaseModel):
    """The body of `POST /judge`."""

    function: Annotated[str, AfterValidator(checked_function)]
    files: Annotated[dict[FileName, Digest], Field(max_length=MOST_FILES)] = Field(default_factory=dict)
    cpu_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    wall_s: Annotated[float, Field(gt=0, le=7200)] = 30.0
    requests: Annotated[list[TextRequest], Field(max_length=MOST_REQUESTS)]


class RequestRefusedError(Exception):
    """A request is answered with `status` and the text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def create_functions_app(crew: Crew, secret: SecretStr, clock: Callable[[], float] = time.time) -> FastAPI:
    """The application. `clock`: Unix seconds."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await crew.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def put(digest: str, request: Request) -> JSONResponse:
        content = await _signed_body(request, secret, clock, FILE_BYTES)
        if digest_of(content) != digest:
            raise RequestRefusedError(422, "the file is not the one that its digest names")
        crew.files.put(content)
        return JSONResponse({})

    async def judge(request: Request) -> JSONResponse:
        body = await _signed_body(request, secret, clock, BODY_BYTES)
        try:
            asked = FunctionRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise RequestRefusedError(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if missing := crew.files.missing(asked.files):
            return JSONResponse({"missing": missing})
        limits = TextLimits(asked.cpu_s, asked.wall_s)
        texts = [text.model_dump() for text in asked.requests]
        return JSONResponse({"results": await crew.judge_all(asked.function, asked.files, texts, limits)})

    app.add_api_route("/healthz", health)
    app.add_api_route("/files/{digest}", put, methods=["PUT"])
    app.add_api_route("/judge", judge, methods=["POST"])
    app.add_exception_handler(RequestRefusedError, _refused)
    app.add_exception_handler(CrewBusyError, _busy)
    return app


async def _signed_body(request: Request, secret: SecretStr, clock: Callable[[], float], most: int) -> bytes:
    """The body of a request that is signed. Raises RequestRefusedError."""
    header = request.headers.get(SIGNATURE_HEADER)
    if not header:
        raise RequestRefusedError(401, f"{SIGNATURE_HEADER}: missing: expected t=UNIX_SECONDS,v1=HEX")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise RequestRefusedError(413, f"the body is too long: expected at most {most} bytes")
    try:
        check_signature(secret, bytes(body), header, clock())
    except RequestSignatureError as error:
        raise RequestRefusedError(401, str(error)) from None
    return bytes(body)


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRefusedError)
    return JSONResponse({"error": one_line(str(error), ERROR_CHARACTERS)}, status_code=error.status)


def _busy(_: Request, __: Exception) -> JSONResponse:
    headers = {"Retry-After": str(BUSY_S)}
    return JSONResponse({"error": "too many texts wait"}, status_code=503, headers=headers)
