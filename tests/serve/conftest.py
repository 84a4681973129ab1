"""Serving tests: makes the harness importable (`engine.py`) and, where SGLang is, fit for a CPU."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = HERE / "site"  # what lets SGLang run on a CPU
sys.path[:0] = [str(HERE), str(SITE)]
if find_spec("sglang") is not None and not torch.cuda.is_available():
    import sglang_on_cpu

    sglang_on_cpu.install()
    # for the processes that an engine starts
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
