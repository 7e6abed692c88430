"""A judging process that is not one: it sends the lines that a reference names, in place of a judgement.

In a line MARK stands for the request's own mark, LAST for that of the request before.
"""

import json
import sys


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    say("{}")  # ready
    last = ""
    for request in sys.stdin:
        mark, *asked = json.loads(request)
        if not asked:
            say(json.dumps({"to": mark}))
            continue
        say(asked[2]["says"].replace("MARK", mark).replace("LAST", last))
        last = mark


if __name__ == "__main__":
    main()
