"""Lets SGLang's engine run on a CPU, as it is installed, for tests.

SGLang's CPU engine wants Intel's AMX and its own kernels. Here everything runs in plain torch: packages
of GPU code are stand-ins whose functions refuse to be called, SGLang's Triton kernels (of the allocator)
run under Triton's interpreter, and the few places that insist on CPU kernels take the plain path.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STAND_INS = ("sgl_kernel", "soundfile", "torchvision", "tvm_ffi", "xgrammar")
VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    # every step checks that no cache slot is lost or used twice
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


class Missing:
    """Anything of a package that is not there: may be imported, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} does not run on a CPU")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()  # classes may derive from it

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {"type": "any"}  # SGLang's request models name types of the packages


class StandIns(MetaPathFinder, Loader):
    """Finds every module of the packages in `STAND_INS`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STAND_INS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = Missing(spec.name).__getattr__  # type: ignore[method-assign]
        if spec.name == "soundfile":
            module.available_formats = dict  # type: ignore[attr-defined]  # mistral_common asks while it is imported
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Prepare this process; before SGLang, Transformers or Triton are imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandIns())


@cache
def register() -> None:
    """The plain paths; SGLang calls it in each of its processes, as it does a plugin's."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from triton.runtime import interpreter

    def rope(*arguments: Any) -> Any:
        return factory.get_rope(*arguments[:8])  # without the device

    factory.get_rope_cpu = rope
    # torch's own attention reads keys and values from the cache, so it cannot do MLA's expanded form
    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
    patch = interpreter._patch_lang_tensor

    def patch_for_numpy_2_4(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_for_numpy_2_4
