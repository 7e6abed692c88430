"""A judging process with one more verifier: `python` runs the text, like an expression that reaches eval().

The answer is what the text leaves in `found`, or the name of the exception that it raised.
"""

import sys
from collections.abc import Mapping
from typing import Any

from verifier.sandbox.child import main
from verifier.verifiers.base import Judgement
from verifier.verifiers.registry import VERIFIERS


def run(text: str, reference: Mapping[str, Any]) -> Judgement:
    scope = dict(reference)
    try:
        exec(text, scope)
    except OSError as error:
        scope["found"] = f"{type(error).__name__} {error.errno}"
    except Exception as error:  # noqa: BLE001 - its name is the answer
        scope["found"] = type(error).__name__
    return Judgement(correct=True, score=1.0, answer=str(scope.get("found", "went through")))


VERIFIERS["python"] = run

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
