"""Sphinx extension: put MathJax into the built book, so that formulas render without a network.

The package sphinx-mathjax-offline carries MathJax 3; one self-contained file of it is enough. It
goes to `_static/mathjax/` of the output, where `mathjax_path` in `_config.yml` points.
"""

from importlib.metadata import distribution
from pathlib import Path
from shutil import copyfile

SOURCE = "sphinx-mathjax-offline/static/mathjax/tex-svg-full.js"


def copy_mathjax(app):
    """Copy before pages are written: a page's link to the script carries its checksum."""
    target = Path(app.outdir, "_static", app.config.mathjax_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    copyfile(distribution("sphinx-mathjax-offline").locate_file(SOURCE), target)


def setup(app):
    app.connect("builder-inited", copy_mathjax)
    # On every page: formulas in titles show in the sidebar of pages that have none themselves.
    app.set_html_assets_policy("always")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
