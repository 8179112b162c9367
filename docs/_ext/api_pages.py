"""Sphinx extension: writes one page of reference for each package of the library, from its modules' docstrings.

The pages are made anew by every build, in `_generated/`: a new module appears by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

import pdhandoff

__all__ = ["page_for", "public_modules", "setup", "write_pages"]

PACKAGES: Final = ("protocol", "layouts", "planner", "engines", "native", "runtime", "observe", "testing")
TOP: Final = ("errors", "ids", "limits")


def public_modules(package: Path) -> list[str]:
    """Names of the modules below a package's folder that are not private, relative to it, without the packages."""
    paths = (path.relative_to(package).with_suffix("") for path in sorted(package.rglob("*.py")))
    return [".".join(path.parts) for path in paths if not any(part.startswith("_") for part in path.parts)]


def page_for(title: str, modules: list[str]) -> str:
    """A page that documents modules, by their full names."""
    directive = "## `{0}`\n\n```{{eval-rst}}\n.. automodule:: {0}\n   :members:\n```\n"
    return "\n".join([f"# {title}\n", *(directive.format(module) for module in modules)])


def write_pages(app: Sphinx) -> None:
    """Write the pages that are missing or have changed."""
    folder = Path(app.srcdir) / "_generated" / "api"
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(pdhandoff.__path__[0])
    pages = {"core": page_for("Errors, ids, limits", [f"pdhandoff.{name}" for name in TOP])}
    for package in PACKAGES:
        modules = [f"pdhandoff.{package}.{name}" for name in public_modules(root / package)]
        if modules:
            pages[package] = page_for(f"pdhandoff.{package}", modules)
    for stale in set(folder.glob("*.md")) - {folder / f"{name}.md" for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
