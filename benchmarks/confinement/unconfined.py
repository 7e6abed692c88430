"""Owns a judging process without confinement, for the comparison only. It reports the lack of confinement.

Must not judge anything that a model wrote.
"""

import sys

from verifier.sandbox import child

if __name__ == "__main__":
    child.confine = lambda: ["this benchmark's process is not confined"]
    sys.exit(child.main(sys.argv[1:]))
