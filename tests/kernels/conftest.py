"""Kernel tests: on a GPU where there is one, else small cases under Triton's interpreter.

The interpreter has no inline assembly, no BF16 subnormals, no Gluon, and truncates where it converts
to BF16. So it runs the portable kernels on the same numbers in fp32, with fp32 outputs; the masks that
only assembly holds are checked in `test_layout.py`, the Gluon kernel's code in `test_compiled.py`.
Without Triton only `test_layout.py` is collected.
"""

from importlib.util import find_spec

import pytest
import torch

GPU = torch.cuda.is_available()
TRITON = find_spec("triton") is not None
collect_ignore_glob = (
    [] if TRITON else [f"test_{name}.py" for name in ("decode", "plan", "write", "compiled", "testbed")]
)
if TRITON and not GPU:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_numpy_2_4(tensor, scope):
        """NumPy 2.4 no longer turns an array of one element into an index."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_for_numpy_2_4


def pytest_report_header():
    return None if TRITON else "kernels: Triton is not installed, only the layout is tested"


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device():
    return "cuda" if GPU else "cpu"
