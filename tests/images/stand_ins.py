"""Owns stand-ins for the programs that push and sign: each records its arguments and standard input.

Must not be used where the real program could run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DIGEST = {"cpu": "sha256:" + "c" * 64, "gpu": "sha256:" + "9" * 64, "chart": "sha256:" + "a" * 64}
BILL = '{"bomFormat": "CycloneDX"}'
SCRIPT = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
given = sys.stdin.read() if "--password-stdin" in arguments else ""
with open(os.environ["STAND_IN_LOG"], "a") as log:
    log.write(json.dumps([[name, *arguments], given]) + "\\n")
digests = {DIGEST!r}
if name == "helm" and arguments[0] not in ("push", "registry"):
    os.execv(os.environ["REAL_HELM"], ["helm", *arguments])
elif name == "helm" and arguments[0] == "push":
    print("Pushed: " + arguments[-1].removeprefix("oci://") + "/penstock:0.1.0", file=sys.stderr)
    print("Digest: " + digests["chart"], file=sys.stderr)
elif name == "buildah" and arguments[0] == "push":
    Path(arguments[arguments.index("--digestfile") + 1]).write_text(digests[arguments[-1].rpartition("-")[2]])
elif name == "podman" and arguments[0] == "run":
    print({BILL!r})
"""
NAMES = ("buildah", "podman", "cosign", "helm")


def write(folder: Path) -> Path:
    """Write the programs to a folder, which goes to the front of PATH; returns it."""
    folder.mkdir()
    for name in NAMES:
        program = folder / name
        program.write_text(SCRIPT)
        program.chmod(0o755)
    return folder


def calls(log: Path) -> list[tuple[list[str], str]]:
    """Each call: the program with its arguments, and its standard input."""
    return [(call, given) for call, given in map(json.loads, log.read_text().splitlines())]
