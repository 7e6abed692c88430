"""No program passes a test that it does not solve: each one here tries another way to be called correct."""

import pytest

SECRET = 73_514
REFERENCES = {
    "a value that is compared outside": {
        "asserts": [f"assert solve(3) == {SECRET}", f"assert solve(4) == {SECRET + 1}"]
    },
    "an assert that a checker runs": {
        "asserts": [
            f"assert all(solve(n) == {SECRET} + n - 3 for n in (3, 4))",
            f"assert solve(3) in {{{SECRET}: 1, **{{}}}}",
        ]
    },
    "a function that checks": {
        "prompt": "def solve(n):\n    '''Find it.'''\n",
        "entry_point": "solve",
        "test": f"def check(candidate):\n    for n in (3, 4):\n        assert candidate(n) == {SECRET} + n - 3\n",
    },
    "output": {"tests": [{"stdin": "3\n", "stdout": f"{SECRET}\n"}, {"stdin": "4\n", "stdout": f"{SECRET + 1}\n"}]},
    "a method": {
        "public_test_cases": [{"input": "3", "output": str(SECRET), "testtype": "functional"}],
        "metadata": {"func_name": "solve"},
    },
}
TRUE_TO_ALL = """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __instancecheck__(self, other): return True
"""
FORGERIES = {
    "an exit with success": "import sys; sys.exit(0)",
    "an immediate exit": "import os; os._exit(0)",
    "an exit in the function": r"""
import os
def solve(n): os._exit(0)
""",
    "printing that all passed": r"""
print('PASSED'); print('OK'); print('1 passed')
def solve(n): print('PASSED')
""",
    "an object equal to everything": TRUE_TO_ALL + "def solve(n): return Everything()",
    "an int equal to everything": r"""
class Int(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
    __contains__ = __lt__ = __eq__
def solve(n): return Int(0)
""",
    "a dict equal to everything": r"""
class D(dict):
    def __eq__(self, other): return True
    def __missing__(self, k): return self
def solve(n): return D()
""",
    "exit handlers": r"""
import atexit, os
atexit.register(os._exit, 0)
def solve(n): raise SystemExit(0)
""",
    "patched built-ins": r"""
import builtins
for name in ('all', 'any', 'bool', 'eval', 'exec', 'compile', 'repr', 'sum'):
    setattr(builtins, name, lambda *a, **k: True)
def solve(n): return 0
""",
    "names of its own for built-ins": r"""
def all(x): return True
def solve(n): return 0
abs = len = any = isinstance = all
""",
    "no AssertionError": r"""
import builtins
builtins.AssertionError = type('Never', (Exception,), {})
def solve(n): return 0
""",
    "a trace function": r"""
import sys
def trace(frame, event, arg):
    frame.f_globals['solve'] = lambda n: True
    return trace
sys.settrace(trace)
def solve(n): return 0
""",
    "replaced modules": r"""
import sys, types
for name in list(sys.modules):
    if 'verifier' in name or name == 'json':
        sys.modules[name] = types.ModuleType(name)
def solve(n): return 0
""",
    "a patched encoder": r"""
import verifier.programs.inside.encoding as e, verifier.programs.inside.solution as s
s.encode = e.encode = lambda *a: True
s._send = lambda line: None
def solve(n): return 0
""",
    "lines for its results": r"""
import os
for line in (b'[true]\n', b'{"passed": true, "why": null}\n'):
    for fd in range(3, 12):
        try: os.write(fd, line)
        except OSError: pass
os._exit(0)
""",
    "lines for its results, late": r"""
import os
def solve(n):
    os.write(3, b'{"value": true, "arguments": []}\n' * 9)
    os._exit(0)
""",
    "a frame for the service": r"""
import os, struct, json
frame = {'checks': '{"passed": true, "why": null}\\n' * 2, 'stdout': '', 'stderr': '', 'result': '[true]'}
text = json.dumps(frame | {'limit': '', 'status': 0}).encode()
for fd in (1, 2, 3, 4, 5, 6):
    try: os.write(fd, struct.pack('!I', len(text)) + text)
    except OSError: pass
def solve(n): os._exit(0)
""",
    "a thread that outlives it": r"""
import threading, time, os
def late():
    time.sleep(0.05); os.write(3, b'[true]\n')
threading.Thread(target=late).start()
def solve(n): return 0
""",
    "a child that outlives it": r"""
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(0.01); os.write(3, b'[true]\n')
def solve(n): return 0
""",
    "asking its checker": r"""
import os
def solve(n):
    os.write(3, b'{"operation": "name", "name": "pieces"}\n')
    return os.read(4, 1000)
""",
    "raising what a test expects": "def solve(n): raise AssertionError('passed')",
    "a generator of answers": r"""
def solve(n):
    yield from range(10)
""",
    "unittest": r"""
import unittest
unittest.TestCase.assertEqual = lambda *a: None
unittest.main = lambda *a: None
def solve(n): return 0
""",
    "None": "def solve(n): pass",
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forgery_passes_no_test(judged, kind, name):
    found = await judged(FORGERIES[name], REFERENCES[kind], cpu_s=2, wall_s=4)
    assert (found.correct, found.score) == (False, 0.0), found.reason


@pytest.mark.parametrize("kind", REFERENCES)
async def test_an_honest_program_passes_all_tests(judged, kind):
    """Otherwise the test above would prove nothing."""
    called = "print(solve(int(input())))" if kind == "output" else ""
    found = await judged(f"def solve(n): return {SECRET} + n - 3\n{called}", REFERENCES[kind])
    assert (found.correct, found.score) == (True, 1.0), found.reason


SEARCH = f"""
import gc, os

def readable(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 24)
    except (OSError, ValueError):
        return b""

def solve(n):
    secret, hits = str({SECRET // 2} * 2).encode(), []
    for pid in {{*range(10)}} - {{os.getpid()}}:
        for name in ("cmdline", "environ", "maps", "mem", "fd/0", "fd/3", "stack", "task/1/mem"):
            hits += [f"{{pid}} {{name}}"] if secret in readable(f"/proc/{{pid}}/{{name}}") else []
    for folder in ("/tmp", "/dev/shm", "/penstock", "/run"):
        for root, _, files in os.walk(folder):
            hits += [path for path in (os.path.join(root, name) for name in files) if secret in readable(path)]
    hits += ["memory" for each in gc.get_objects() if type(each) is dict and "pieces" in each]
    raise ValueError("found it in " + ", ".join(hits) if hits else "nowhere")
"""


@pytest.mark.parametrize("kind", [kind for kind in REFERENCES if kind != "output"])
async def test_a_program_finds_no_expected_value(judged, kind):
    found = await judged(SEARCH, REFERENCES[kind])
    assert not found.correct
    assert "nowhere" in found.reason, found.reason
