"""Owns the page in a browser and the API reference: files of this package, which show nothing without a token.

Must not serve a file outside of page/static.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).parent.parent / "page" / "static"

router = APIRouter(include_in_schema=False)


@router.get("/")
async def show_page() -> FileResponse:
    """The page."""
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})


@router.get("/docs")
async def show_reference() -> FileResponse:
    """The API reference."""
    return FileResponse(STATIC / "docs.html", headers={"Cache-Control": "no-cache"})


@router.get("/favicon.ico")
async def show_icon() -> RedirectResponse:
    """The icon, where browsers look for one."""
    return RedirectResponse("/page/icon.svg")


def mount_files(app: FastAPI) -> None:
    """Serve the page's files under /page. Links are not followed."""
    app.mount("/page", StaticFiles(directory=STATIC, follow_symlink=False), name="page")
