"""Owns a judging process without confinement, for comparison alone; its parent is told so.

Must not judge anything that a model wrote.
"""

import sys

from verifier import judging

if __name__ == "__main__":
    judging.confine = lambda: ["this benchmark's process is not confined"]
    sys.exit(judging.main(sys.argv[1:]))
