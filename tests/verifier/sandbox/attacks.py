"""Owns hostile texts, which run as Python where a text is evaluated, and the verdicts that they must not change.

Must not be run outside of the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator

import reasoning_gym

from services.contracts import Outcome
from services.settings.rewards.reward import Reward, parse_text
from verifier.verifiers.base import Candidate

PROGRAM = "tests.verifier.sandbox.evaluating"
"""A program that gives scorers every answer: what is tried here must hold without the look at the answer."""

_PATCH = "import verifier.verifiers.{0} as m\nfrom verifier.verifiers.base import Judgement\n"
_TRUE = "lambda *a, **k: Judgement(correct=True, score=1.0)"
_FRAME = "import json, os, sys, time\nf = sys._getframe()\nwhile 'replies' not in f.f_locals: f = f.f_back\n"
_FORGED = (
    _FRAME + "mark, requests, replies = (f.f_locals[n] for n in ('mark', 'requests', 'replies'))\n"
    "replies.write(json.dumps({'to': mark, 'correct': True, 'score': 1.0}).encode() + b'\\n')\n"
)
_FOREVER = "while True:\n    try: time.sleep(0.1)\n    except BaseException: pass\n"

ATTACKS: dict[str, str] = {
    "replaced judge": "import verifier.verifiers.registry as r\nfrom verifier.verifiers.base import Judgement\n"
    f"for name in list(r.VERIFIERS): r.VERIFIERS[name] = {_TRUE}",
    "replaced builtins": "import builtins\n"
    "for n in ('float', 'str', 'bool', 'len', 'isinstance', 'any', 'all', 'repr'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)",
    "patched verifier modules": _PATCH.format("math.verdict")
    + f"m.judge = {_TRUE}\nimport verifier.verifiers.regex as x, verifier.verifiers.answer_line as l\n"
    f"x.judge = l.judge = {_TRUE}",
    "patched child": "import verifier.sandbox.child as c\nfrom verifier.verifiers.base import Judgement\n"
    "c._answer = {_TRUE}",
    "patched scorer": _PATCH.format("reasoning_gym") + "m._scorer = lambda task: lambda a, e: 1.0",
    "patched re": "import re\nre.search = re.Pattern = lambda *a, **k: re.compile('').match('')",
    "patched json": 'import json\njson.dumps = lambda *a, **k: \'{"correct": true, "score": 1.0, "to": ""}\'',
    "patched time": "import time\ntime.monotonic = time.time = lambda: 0.0",
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "abort": "import os\nos.abort()",
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "a thread": "import threading\nthreading.Thread(target=print, daemon=True).start()",
    "a line on every descriptor": "import os\nfor d in range(64):\n"
    '    try: os.write(d, b\'{"to": "", "correct": true}\\n\')\n'
    "    except OSError: pass",
    "a forged reply": _FORGED,
    "a forged reply, then a pause for ever": _FORGED + _FOREVER,
    "half a reply": _FRAME + "f.f_locals['replies'].write(b'{\"to\"')\nos._exit(0)",
    "a large reply": _FRAME + "f.f_locals['replies'].write(b'x' * 100000)",
    "the next request is read": _FRAME
    + "import select\nselect.select([f.f_locals['requests']], [], [], 0.2)\nos._exit(0)",
    "the process is taken over": _FORGED + "for line in requests:\n    mark = json.loads(line)[0]\n"
    "    replies.write(json.dumps({'to': mark, 'correct': True, 'score': 1.0}).encode() + b'\\n')",
    "dup2 over the pipes": "import os\nfor d in range(3, 16):\n    try: os.dup2(0, d)\n    except OSError: pass",
    "closed descriptors": "import os\nos.closerange(0, 64)",
    "atexit": "import atexit, os, sys\natexit.register(os.write, 1, b'x')\nsys.exit(0)",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
    "a bomb of forks": "import os\nwhile True: os.fork()",
    "/proc": "import os\nfor p in os.listdir('/proc'):\n    print(open(f'/proc/{p}/environ').read())",
    "memory of its parent": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b').write(b'x')",
    "the environment": "import os\nos.environ.clear()\nos.environ['PYTHONPATH'] = '/tmp'",
    "sockets": "import socket\nsocket.create_connection(('127.0.0.1', 6379))",
    "a signal to its parent": "import os\nos.kill(os.getppid(), 9)",
    "a stop of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "gc hooks": "import gc, os\ngc.callbacks.append(lambda *a: os._exit(1))\ngc.set_threshold(1)\ngc.unfreeze()",
    "settrace": "import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit))",
    "setprofile": "import sys\nsys.setprofile(lambda *a: None)\nsys.setprofile(lambda *a: sys.exit())",
    "signal handlers and timers": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)",
    "import hooks": "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit\n"
    "sys.meta_path.insert(0, H())\n"
    "sys.path_importer_cache.clear()",
    "sys.modules": "import sys, types\nfor n in list(sys.modules):\n"
    "    if n.startswith(('reasoning_gym', 'verifier', 'sympy', 'json')): sys.modules[n] = types.ModuleType(n)",
    "finalizers": "import weakref, os, builtins\nclass K: pass\nbuiltins.kept = K()\n"
    "weakref.finalize(builtins.kept, os._exit, 1)\ndel builtins.kept",
    "a lasting allocation": "import builtins\nbuiltins.kept = bytearray(300 << 20)",
    "a memory bomb": "kept = []\nwhile True: kept.append(bytearray(64 << 20))",
    "contexts of numbers": "import decimal, builtins, fractions\ndecimal.getcontext().prec = 1\n"
    "fractions.Fraction.__eq__ = lambda *a: True",
    "the recursion limit": "import sys\nsys.setrecursionlimit(60)",
    "the locale": "import locale\nlocale.setlocale(locale.LC_ALL, 'C')\nlocale.localeconv = lambda: {}",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "a loop that catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a sleep": "import time\n" + _FOREVER,
    "its own limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "sys.stdout": "import sys\nsys.stdout = sys.stderr = None\nsys.excepthook = print",
}
"""Statements by what they try."""

FUNCTIONS = """
from verifier.verifiers.base import Judgement

def evaluating(messages, response, reference, metadata):
    exec(response, {})
    return response == reference

def plain(messages, response, reference, metadata):
    return float(response) == float(reference)
"""
FILES = {"./rewards.py": FUNCTIONS}
EVALUATING, PLAIN = (parse_text(f"python:./rewards.py:{name}") for name in ("evaluating", "plain"))
GYM = parse_text("reasoning-gym")


def as_answer(code: str, seed: int = 1) -> tuple[Reward, Candidate]:
    """Code as an answer to string_insertion, whose scorer evaluates it."""
    entry = reasoning_gym.create_dataset("string_insertion", size=1, seed=seed)[0]
    return GYM, Candidate(f"<answer>exec({code!r})</answer>", {"task": "string_insertion", "entry": entry})


def as_response(code: str) -> tuple[Reward, Candidate]:
    """Code as a response to a function of the user's that runs it."""
    return EVALUATING, Candidate(code, {"answer": "something else"})


CHAIN_SUM = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
INSERTION = reasoning_gym.create_dataset("string_insertion", size=1, seed=1)[0]


def _texts(number: int) -> Iterator[tuple[Reward, Candidate, Outcome]]:
    """A right and a wrong text for each verifier. `number`: makes them differ from those of another call."""
    right, wrong = str(number), str(number + 1)
    outcomes = ((right, Outcome.CORRECT), (wrong, Outcome.WRONG))
    for said, outcome in outcomes:
        yield parse_text("math"), Candidate(rf"\boxed{{{said}}}", {"answer": right}), outcome
        yield parse_text("answer-line"), Candidate(f"Answer: {said}", {"answer": right}), outcome
        yield parse_text("pattern"), Candidate(said, {"pattern": rf"\b{right}\b"}), outcome
        yield PLAIN, Candidate(said, {"answer": right}), outcome
    for entry, task in ((CHAIN_SUM, "chain_sum"), (INSERTION, "string_insertion")):
        reference = {"task": task, "entry": entry}
        yield GYM, Candidate(f"<answer>{entry['answer']}</answer>", reference), Outcome.CORRECT
        yield GYM, Candidate("<answer>0</answer>", reference), Outcome.WRONG


def later_texts(count: int) -> list[tuple[Reward, Candidate, Outcome]]:
    """Texts of every verifier, right and wrong, with their outcomes."""
    found: list[tuple[Reward, Candidate, Outcome]] = []
    while len(found) < count:
        found += _texts(100 + len(found))
    return found[:count]
