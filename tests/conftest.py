"""Shared settings of the tests."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "quant"))  # the NumPy references
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # kernels run under Triton's interpreter; it is chosen when Triton is first imported, by whatever test
    os.environ.setdefault("TRITON_INTERPRET", "1")
