"""Sphinx: ``sphinx-build -W docs docs/_build``."""

import cuflash

project = "cuflash"
author = "The cuflash developers"
release = version = cuflash.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "package.md"]  # the latter stands on the package index
html_theme = "alabaster"
html_theme_options = {"description": "Exact attention for CuPy, NumPy and DLPack", "page_width": "1100px"}
html_show_copyright = False
myst_heading_anchors = 3
# The docstrings say it in words.
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
