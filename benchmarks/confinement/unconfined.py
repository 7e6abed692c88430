"""Owns a judging process without confinement, for comparison alone; its parent is told so.

Must not judge anything that a model wrote.
"""

import sys

from verifier.sandbox import child

if __name__ == "__main__":
    child.confine = lambda: ["this benchmark's process is not confined"]
    sys.exit(child.main(sys.argv[1:]))
