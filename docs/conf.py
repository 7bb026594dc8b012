"""Sphinx configuration. The build reads no network: no intersphinx."""

import doctest
import sys
from pathlib import Path

from rawflash._version import __version__

sys.path.insert(0, str(Path(__file__).parent))  # mathml.py, and what the examples import

project = "rawflash"
author = "The rawflash developers"
copyright = "2026, The rawflash developers"
release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "mathml",
    "myst_parser",
    "numpydoc",
]
exclude_patterns = ["_build", "figures"]  # figures/*.md are parts of pages
html_theme = "furo"
html_title = "rawflash"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # numpydoc's Parameters section states shapes and dtypes, which a type cannot
numpydoc_show_class_members = False  # a page lists the members it speaks of

doctest_default_flags = doctest.ELLIPSIS  # an error's message is compared too
doctest_global_setup = "import numpy as np\nimport rawflash as rf"
doctest_test_doctest_blocks = ""  # pytest runs the docstrings; Sphinx runs the pages' {doctest} blocks
