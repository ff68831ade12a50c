"""Sphinx: ``sphinx-build -W docs docs/_build``."""

import re

import cuflash

project = "cuflash"
author = "The cuflash developers"
release = version = cuflash.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = [
    "_build",
    "package.md",  # stands on the package index
    "lab/results/paper.md",  # is a part of measured.md
]
html_theme = "alabaster"
html_static_path = ["_static"]
html_theme_options = {
    "description": "Exact attention for CuPy, NumPy and DLPack",
    "page_width": "1060px",  # in a narrower window the sidebar stands below the text
    "body_max_width": "none",
    "sidebar_width": "190px",
}
html_show_copyright = False
myst_heading_anchors = 3
# The docstrings say it in words.
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False


def link_pages(app, what, name, obj, options, lines):
    """Let the pages that docstrings name, as docs/semantics.md, be links."""
    lines[:] = [re.sub(r"(?<!`)docs/(\w+)\.md", r":doc:`docs/\1.md <\1>`", line) for line in lines]


def setup(app):
    """Connect what Sphinx is to call."""
    app.connect("autodoc-process-docstring", link_pages)
