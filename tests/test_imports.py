"""Who may import whom, and how little an import of the package does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# folder: what it may import of ours, besides itself
ALLOWED = {
    "common": set(),
    "quant": {"rolaq.common.errors"},
    "kernels": {"rolaq.quant", "rolaq.common"},
    "calib": {"rolaq.quant", "rolaq.common"},
    "eval": {"rolaq.quant", "rolaq.common"},
    "serve": {"rolaq.quant", "rolaq.kernels", "rolaq.common"},
    "testbed": {"rolaq.quant", "rolaq.common"},
    "conf": set(),
}
HEAVY = {"wandb", "lm_eval", "sglang", "matplotlib", "datasets", "hydra"}
FILES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path, package: str) -> set[str]:
    """Absolute names of everything of ours that a file imports, `from x import y` as `x.y`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "rolaq"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_table(path):
    relative = path.relative_to(ROOT)
    allowed = ALLOWED[relative.parts[0]] | {f"rolaq.{relative.parts[0]}"}
    package = ".".join(["rolaq", *relative.parts[:-1]])
    wrong = [
        name
        for name in imported(path, package)
        if not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
        and name != "rolaq.__version__"
    ]
    assert not wrong, f"{relative} may import {sorted(allowed)} of ours, not {wrong}"


def test_the_reader_of_imports_sees_all_forms(tmp_path):
    (tmp_path / "a.py").write_text(
        "import rolaq.eval\nfrom rolaq import calib\nfrom .x import y\nfrom ..common import errors\nfrom . import z\n"
    )
    assert imported(tmp_path / "a.py", "rolaq.quant") == {
        "rolaq.eval",
        "rolaq.calib",
        "rolaq.quant.x.y",
        "rolaq.common.errors",
        "rolaq.quant.z",
    }


def test_links_lead_to_the_folders():
    for link in (ROOT / "src" / "rolaq").iterdir():
        if link.is_symlink():
            assert link.readlink() == Path("../../") / link.name
            assert link.name in ALLOWED


def modules() -> list[str]:
    """The package, its folders, and all of what every command loads."""
    found = ["rolaq"]
    for folder in ("calib", "eval", "testbed", "conf"):
        if (ROOT / folder / "__init__.py").exists():
            found.append(f"rolaq.{folder}")
    for folder in ("common", "quant"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":
                found.append(".".join(["rolaq", *(part for part in parts if part != "__init__")]))
    return found


def test_importing_is_light():
    """Neither heavy libraries nor CUDA: checked in a process of its own."""
    script = (
        "import importlib, sys\n"
        f"for name in {modules()!r}: importlib.import_module(name)\n"
        f"loaded = sorted(set(sys.modules) & {HEAVY!r})\n"
        "assert not loaded, loaded\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src")
    assert done.returncode == 0, done.stderr
