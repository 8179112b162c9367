"""Configuration of the documentation's build."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "pdhandoff"
copyright = "the pdhandoff contributors"  # noqa: A001 - Sphinx's name for it
version = release = installed_version("pdhandoff")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_pages", "transition_tables"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
suppress_warnings = ["ref.python"]  # short names such as `kind` and `link` are fields of several classes

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_legacy_class_based = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "pdhandoff"
html_static_path = ["_static"]
html_show_sphinx = False
