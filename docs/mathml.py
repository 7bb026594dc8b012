"""Sphinx extension: formulas become MathML when the pages are built. Browsers draw it without a script or a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

log = logging.getLogger(__name__)
converter = LatexToMathML()


def mathml(node: nodes.Element, block: bool) -> str:
    """The MathML of a formula; a warning where it is none."""
    latex = node.astext()
    if block and r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    try:
        return converter.convert_with_local_state(latex, displaystyle=block)
    except LatexError as error:
        log.warning("formula %r: %s", latex, error, location=node)
        return ""


def inline(self: Any, node: nodes.Element) -> None:
    self.body.append(self.starttag(node, "span", "", CLASS="math notranslate") + mathml(node, False) + "</span>")
    raise nodes.SkipNode


def block(self: Any, node: nodes.Element) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math notranslate"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(mathml(node, True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
