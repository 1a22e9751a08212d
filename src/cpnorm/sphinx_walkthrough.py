"""Sphinx extension: the text of `cpnorm walkthrough`, as it is now, as a page of the book."""

from pathlib import Path

from cpnorm import walkthrough

PAGE = "book/19_walkthrough"
PLACE = "<!-- the text of cpnorm walkthrough -->"


def fill(app, docname, source):
    """Put the text where the page's file has `PLACE`."""
    if docname == PAGE:
        source[0] = source[0].replace(PLACE, walkthrough.text(Path(app.srcdir)))


def setup(app):
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
