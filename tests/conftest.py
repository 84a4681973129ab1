"""Shared settings of the tests."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "quant"))  # the NumPy references
torch.set_num_threads(1)
