"""The shape of the package: imports point one way, files and functions fit in the head, the public surface is named."""

import ast
from pathlib import Path

import pytest

import underpaint

ROOT = Path(underpaint.__file__).parent
# Each layer may import those before it, and itself.
LAYERS = (
    ("errors", "host_memory", "devices", "turnstile"), ("config", "images", "report"), ("request",), ("layout",),
    ("kernels",), ("attention",), ("kv",), ("capture",), ("sampling",),
    ("models",),
    ("generation", "understanding"), ("handover",), ("service",), ("studio",), ("pipeline",), ("chat", "description"),
    ("bench", "doctor"),
    ("server",), ("commands",), ("cli", "__main__"),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 45
MAX_KERNEL_LINES = 120


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "underpaint":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("underpaint.")}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    upward = {name for name in imports(tree) if RANK.get(name, 0) > RANK[layer_of(path)]}
    assert not upward, f"imports from a layer above: {upward}"
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("Exception", "everything"), "no broad except"
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            is_kernel = {"triton.jit", "gluon.jit"} & {*map(ast.unparse, node.decorator_list)}
            limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            assert (node.end_lineno or 0) - first.lineno < limit, f"{node.name} is too long"


def test_nobody_waits_for_a_whole_device_beside_others() -> None:
    """It is forbidden while another thread captures a graph: see ``devices``. Memory is freed when nobody works."""
    alone = ("bench/", "kernels/", "handover/memory.py", "handover/device_memory.py")
    waiting = [str(path.relative_to(ROOT)) for path in SOURCES if "cuda.synchronize" in path.read_text()]
    assert [path for path in waiting if not path.startswith(alone)] == []


def test_the_public_surface() -> None:
    assert all(getattr(underpaint, name).__module__.startswith("underpaint") for name in underpaint.__all__)
    assert underpaint.__all__ == sorted(underpaint.__all__)
