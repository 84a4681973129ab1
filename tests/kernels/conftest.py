"""Kernel tests: on a GPU where there is one, else small cases under Triton's interpreter.

The interpreter has no inline assembly, no BF16 subnormals, no Gluon, and truncates where it converts
to BF16. So it runs the portable kernels on the same numbers in fp32, with fp32 outputs; the masks that
only assembly holds are checked in `test_layout.py`, the Gluon kernel's code in `test_compiled.py`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
GPU = torch.cuda.is_available()
if not GPU:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_numpy_2_4(tensor, scope):
        """NumPy 2.4 no longer turns an array of one element into an index."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_for_numpy_2_4


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device():
    return "cuda" if GPU else "cpu"
