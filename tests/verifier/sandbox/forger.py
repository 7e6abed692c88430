"""A fake judging process: it sends the lines of the reference instead of a judgement.

In a line, MARK stands for the request's own mark, LAST for the mark of the previous request.
"""

import json
import sys


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    last = ""
    for request in sys.stdin:
        mark, *asked = json.loads(request)
        if not asked:
            say(json.dumps({"to": mark}))
            continue
        say(asked[0]["reference"]["says"].replace("MARK", mark).replace("LAST", last))
        last = mark


if __name__ == "__main__":
    main()
