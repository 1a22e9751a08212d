"""The book's pages are all listed, and the built ones load nothing from the network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from test_notebooks import toc_files

ROOT = Path(__file__).parents[1]
EXTERNAL = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
CSS_LOAD = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
LINK_LOADS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect"}


def unlisted_pages(root):
    """Pages of `book/` that `_toc.yml` does not list."""
    pages = {f"book/{path.stem}" for path in (root / "book").glob("*.md")}
    return sorted(pages - set(toc_files(root)))


class Loads(HTMLParser):
    """Collect what a page loads from elsewhere by itself; links that a reader follows are fine."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        names = ["src", "srcset", "data", "poster"] if tag not in ("a", "link") else []
        if tag == "link" and LINK_LOADS & set((attrs.get("rel") or "").lower().split()):
            names = ["href"]
        urls = [attrs.get(name) or "" for name in names]
        self.found += [url for url in urls if EXTERNAL.match(url)]
        self.found += CSS_LOAD.findall(attrs.get("style") or "")

    def handle_data(self, data):
        if self.get_starttag_text() and self.get_starttag_text().lower().startswith("<style"):
            self.found += CSS_LOAD.findall(data)


def external_loads(html):
    """`page: address` for all that pages and style sheets in `html` load from elsewhere."""
    found = []
    for path in sorted(html.rglob("*")):
        if path.suffix == ".html":
            found += [f"{path.relative_to(html)}: {url}" for url in Loads(path.read_text()).found]
        elif path.suffix == ".css":
            loads = CSS_LOAD.findall(path.read_text())
            found += [f"{path.relative_to(html)}: {url}" for url in loads]
    return found


def test_every_page_is_listed():
    assert unlisted_pages(ROOT) == []


def test_every_listed_page_is_built(html):
    missing = [name for name in toc_files(ROOT) if not (html / f"{name}.html").is_file()]
    assert missing == []


def test_built_book_loads_nothing_from_elsewhere(html):
    assert external_loads(html) == []


def test_unlisted_page_is_noticed(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book/index.md").touch()
    (tmp_path / "book/01_lost.md").touch()
    (tmp_path / "_toc.yml").write_text("root: book/index\n")
    assert unlisted_pages(tmp_path) == ["book/01_lost"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://x.test/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//x.test/a.css">'),
        ("a.html", '<img src="HTTP://x.test/a.png">'),
        ("a.html", '<p style="background: url(https://x.test/a.png)">'),
        ("a.html", "<style>@import 'https://x.test/a.css';</style>"),
        ("b/a.css", 'src: url("https://x.test/a.woff2")'),
    ],
)
def test_external_load_is_noticed(tmp_path, name, text):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert len(external_loads(tmp_path)) == 1


def test_link_for_the_reader_is_no_load(tmp_path):
    (tmp_path / "a.html").write_text('<a href="https://x.test">x</a><img src="a.png">')
    assert external_loads(tmp_path) == []
