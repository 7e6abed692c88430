"""Owns the certificates of the tests: an authority and a server certificate for 127.0.0.1, made with openssl.

Must not be used for anything else: the keys are readable by every user.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.programs import demanded


def make_certificates(folder: Path, host: str = "IP:127.0.0.1") -> Path:
    """Write tls.crt and tls.key for `host` (a subjectAltName) into `folder`; returns the authority's certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    program = demanded("openssl")

    def openssl(*arguments: str) -> None:
        subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test authority")
    openssl("req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=redis")
    (folder / "names").write_text(f"subjectAltName={host}\n")
    openssl(
        "x509",
        "-req",
        "-in",
        "tls.csr",
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "tls.crt",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    for name in ("tls.key", "tls.crt"):
        (folder / name).chmod(0o644)
    return folder / "ca.crt"
