"""Owns the commands about a run's files: checkpoints and export.

Must not write a file but below the folder that the user names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock_client.cli.commands.arguments import JsonOption, RunArgument
from penstock_client.cli.reporting import fail
from penstock_client.cli.terminal import bar, plain, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import StoredFile

SHOWN_DIGEST = 12


def checkpoints(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's checkpoints, from which it can be resumed."""
    from penstock_client.answers import as_json as document

    found = client.checkpoints(run)
    if as_json:
        print_json([document(checkpoint) for checkpoint in found])
        return
    rows = [
        [
            str(checkpoint.step),
            str(checkpoint.version),
            str(len(checkpoint.files)),
            mebibytes(sum(file.size for file in checkpoint.files)),
            checkpoint.name,
        ]
        for checkpoint in found
    ]
    print_table(["step", "version", "files", "size", "name"], rows, right=["step", "version", "files", "size"])
    if not rows:
        print_note(f"{run}: no checkpoints")


def export(
    client: Client,
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Download the files to this folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the files of a run's trained model, or download them; files that are there, whole, are skipped."""
    from penstock_client.answers import as_json as document

    if output is not None:
        files = [_download(client, run, file, output, as_json) for file in _exported(client, run)]
        if as_json:
            print_json({"folder": str(output), "files": files})
        return
    found = client.exported(run)
    if as_json:
        print_json(document(found))
        return
    rows = [[mebibytes(file.size), (file.sha256 or "-")[:SHOWN_DIGEST], file.name] for file in found.files]
    print_table(["size", "sha256", "file"], rows, right=["size"])
    if not rows:
        print_note(f"{run}: no export")


def _exported(client: Client, run: str) -> Sequence[StoredFile]:
    if not (files := client.exported(run).files):
        fail(f"{run}: no export")
    return files


def _download(client: Client, run: str, file: StoredFile, folder: Path, as_json: bool) -> dict[str, Any]:
    """The downloaded file, as --json shows it; without that, its line is printed."""
    from penstock_client.answers import as_json as document

    try:
        with bar(file.name, file.size) as progress:
            fresh = client.download_export(run, file, folder, progress)
    except OSError as error:
        fail(f"--output: {str(folder / file.name)!r} cannot be written ({error.strerror})")
    if not as_json:
        print_line(plain(f"{'downloaded' if fresh else 'is there  '}  {mebibytes(file.size):>12}  {file.name}"))
    return {**document(file), "downloaded": fresh}


def mebibytes(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:,.1f} MiB"
