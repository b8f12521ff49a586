"""The README's promises that a machine can check."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_linked_file_exists() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "README.zh-CN.md",
        *ROOT.glob("docs/**/*.md"),
        ROOT / "pocket" / "README.md",
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_continuous_integration_calls_the_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_module_has_its_line_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "underpaint").rglob("*.py"):
        name = str(path.relative_to(ROOT / "underpaint"))
        folder = f"{path.parent.relative_to(ROOT / 'underpaint')}/"
        assert name.startswith("__") or path.name == "__init__.py" or f"`{name}`" in page or f"`{folder}`" in page, name
