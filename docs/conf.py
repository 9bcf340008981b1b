"""Sphinx: `make docs`, or python -m sphinx -W -b html docs docs/_build/html."""

project = "lightning_ptdp"
author = "the authors of lightning_ptdp"
copyright = author

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = "lightning_ptdp"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
