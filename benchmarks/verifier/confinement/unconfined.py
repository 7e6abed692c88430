"""Owns a warm parent without confinement, for the comparison only. It reports the lack of confinement.

Must not judge anything that a model wrote.
"""

import sys
from typing import Any

from verifier.sandbox import server

if __name__ == "__main__":
    program: Any = server
    program.confine = lambda: ["this benchmark's processes are not confined"]
    program.confine_further = lambda: lambda: None
    sys.exit(server.main(sys.argv[1:]))
