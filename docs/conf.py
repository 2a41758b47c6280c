"""Settings of Sphinx: ``sphinx-build -W -b html docs docs/_build``."""

from torch_fakeify import __version__

project = "torch_fakeify"
author = "the authors of torch_fakeify"
copyright = author  # noqa: A001 - Sphinx's name
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"torch_fakeify {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
myst_heading_anchors = 3
napoleon_use_ivar = True
