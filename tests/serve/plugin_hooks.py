"""A plugin's hooks that can be taken back, so that engines with and without it can live in one process."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any


class Hooks:
    """Applies the hooks that `plugin` registers with SGLang's `HookRegistry`, until `undo`."""

    def __init__(self, plugin: Callable[[], None] | None) -> None:
        self.saved: list[tuple[Any, str, Any]] = []
        if plugin is None:
            return
        from sglang.srt.plugins.hook_registry import HookRegistry

        plugin()
        for target in HookRegistry._hooks:
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            self.saved.append((owner, name, vars(owner).get(name)))  # None: inherited
        HookRegistry.apply_hooks()

    def undo(self) -> None:
        """Put back what the hooks replaced."""
        from sglang.srt.plugins import hook_registry

        for owner, name, before in self.saved:
            now = vars(owner)[name]
            if before is None:
                delattr(owner, name)
                continue
            setattr(owner, name, before)
            hook_registry._propagate_patch(now, before, owner)
        if self.saved:
            hook_registry.HookRegistry.reset()
        self.saved = []
