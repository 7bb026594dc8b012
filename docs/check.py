"""Check a site that was built: every link within it leads somewhere, and nothing loads from another host.

    python docs/check.py docs/_build/html
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}
NOT_LOADED = {"canonical", "next", "prev", "search", "index", "author", "license"}  # links of a page's head by rel
REMOTE_CSS = re.compile(r"@import\s+[^;]*//|url\(\s*['\"]?(?:https?:)?//")


class Page(HTMLParser):
    """Anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        for name, value in named.items():
            if (tag, name) in LOADED and named.get("rel") not in NOT_LOADED:
                self.loaded.append(value)


def problems(site: Path) -> list[str]:
    """What is wrong with a site, a line each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{path.relative_to(site)} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link} is not there")
            elif parts.fragment and target.suffix == ".html":
                anchors = pages[site / target.relative_to(site.resolve())].anchors
                if unquote(parts.fragment) not in anchors:
                    found.append(f"{path.relative_to(site)}: {link} has no such anchor")
    for path in sorted(site.rglob("*.css")):
        if REMOTE_CSS.search(path.read_text()):
            found.append(f"{path.relative_to(site)} loads from another host")
    return found


def main(folder: str) -> int:
    found = problems(Path(folder)) if any(Path(folder).rglob("*.html")) else [f"{folder} has no pages"]
    print(*found, f"{len(found)} problems", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
