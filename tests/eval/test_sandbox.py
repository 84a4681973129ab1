"""Generated programs: right ones pass, every kind of runaway is stopped and harms nothing."""

import os
import time
from pathlib import Path

import pytest

from rolaq.eval.completions import mbpp_code, rescored, warmed
from rolaq.eval.sandbox import CodeEval, _marked, passes

RUNAWAYS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "recursion": "def f(): f()\nf()",
    "memory at once": "a = [0] * 10**11",
    "memory bit by bit": "a = []\nwhile True: a.append('x' * 10**7)",
    "fork": "import os\nwhile True: os.fork()",
    "fork behind the guard": "import posix\nwhile True: posix.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "a large file": "f = open('x', 'w')\nwhile True: f.write('a' * 10**6)",
    "a shell": "import os\nos.system('sleep 60 &')",
    "a process": "import subprocess\nsubprocess.Popen(['sleep', '60'])",
    "output without end": "while True: print('x' * 1000)",
}


@pytest.mark.parametrize("name", RUNAWAYS)
def test_runaways_fail_in_time_and_leave_no_process(name):
    began = time.monotonic()
    assert not passes(RUNAWAYS[name], timeout=1, memory_mb=512)
    assert time.monotonic() - began < 8
    assert not _marked("")  # the mark is a prefix: no process of any sandbox is left


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("assert sorted([2, 1]) == [1, 2]", True),
        ("import math, collections, heapq, re, itertools\nassert math.gcd(4, 6) == 2", True),
        ("assert 1 == 2", False),
        ("def broken(:", False),
        ("import sys\nsys.exit(0)", False),  # ends before its tests
        ("import os\nos._exit(0)", False),
        ("print('0' * 32)\nraise SystemExit", False),
        ("", True),
        ("x = '\\ud800\\u2028ä'\nassert len(x) == 3", True),
    ],
)
def test_only_programs_that_reach_their_end_pass(program, right):
    assert passes(program) is right


def test_programs_see_neither_environment_nor_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    program = (
        "import os\nassert 'WANDB_API_KEY' not in os.environ\n"
        f"assert os.getcwd() != {os.getcwd()!r}\nopen('left', 'w').write('x')"
    )
    assert passes(program)
    assert not Path("left").exists()


def test_programs_run_once_and_in_parallel(monkeypatch):
    metric, calls = CodeEval(workers=4), []
    monkeypatch.setattr("rolaq.eval.sandbox.passes", lambda program, *limits: calls.append(program) or True)
    metric.warm(["a\nt", "b\nt", "a\nt"])
    assert metric.compute(["t", "t", "t"], [["a"], ["b"], ["c"]])[0] == {"pass@1": 1.0}
    assert sorted(calls) == ["a\nt", "b\nt", "c\nt"]


MBPP = {
    "def f(x):\n    return x\n": "def f(x):\n    return x\n",
    "def f(x):\r\n  return x\r\n[DONE]\n\nYou are": "def f(x):\n  return x\n",
    "def f(x):\n    return x\n\nYou are an expert Python programmer, and": "def f(x):\n    return x\n",
    "def f(x):\n    assert x\n    return x\nassert f(1) == 1\ndef g(: ": "def f(x):\n    assert x\n    return x\n",
    "def f(x):\n    return x\nprint(f(3))\ny = 1\n": "def f(x):\n    return x\ny = 1\n",
    "def f(x):\n    return x\nif __name__ == '__main__':\n    f(1)\n    print(2)\n": "def f(x):\n    return x\n",
    "```python\ndef f(x):\n    return x\n```\nThis is": "def f(x):\n    return x\n",
    "def f(x):\n    return x\n```\nassert": "def f(x):\n    return x\n",
    "": "\n",
}


@pytest.mark.parametrize("answer", MBPP)
def test_mbpp_answers_are_cut_to_the_solution(answer):
    assert mbpp_code(answer).strip("\n") == MBPP[answer].strip("\n")


def test_filters_score_the_programs_that_the_harness_will_ask_for():
    metric = CodeEval(workers=2)
    doc = {"test_list": ["assert f(1) == 1"] * 3}
    answers = [["def f(x):\n    return x\nassert f(2) == 3\n"], ["def f(x):\n    return 0\n"]]
    solutions = rescored(metric)(answers, [doc, doc])
    assert [metric.compute(["\n".join(doc["test_list"])], [own])[0]["pass@1"] for own in solutions] == [1, 0]
    human = {"prompt": "def f(x):\n", "test": "def check(g):\n    assert g(1) == 1", "entry_point": "f"}
    build = warmed(metric, lambda resps, docs: [[doc["prompt"] + own[0]] for own, doc in zip(resps, docs)])
    assert build([["    return x"]], [human]) == [["def f(x):\n    return x"]]
    assert metric._known[f"def f(x):\n    return x\n{human['test']}\ncheck(f)"]
