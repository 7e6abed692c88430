"""A warm parent with two more kinds of verifier, which run the text, like an expression that reaches eval().

The texts of `hostile` share a process, those of `evaluated` get one each. The answer is what the text leaves in
`found`, or the name of the exception that it raised.
"""

import sys
from collections.abc import Mapping
from typing import Any

from verifier.sandbox import server
from verifier.verifiers.base import Judgement
from verifier.verifiers.registry import EVERY, VERIFIERS, apart


def run(text: str, reference: Mapping[str, Any], options: Mapping[str, Any]) -> Judgement:
    scope = dict(reference)
    try:
        exec(text, scope)
    except OSError as error:
        scope["found"] = f"{type(error).__name__} {error.errno}"
    except Exception as error:  # noqa: BLE001 - its name is the answer
        scope["found"] = type(error).__name__
    return Judgement(correct=True, score=1.0, answer=str(scope.get("found", "went through")))


VERIFIERS["hostile"] = VERIFIERS["evaluated"] = run
server.apart = lambda kind: [EVERY] if kind == "evaluated" else apart(kind)  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(server.main(sys.argv[1:]))
