"""Every built page in a headless browser: formulas render, nothing is asked of other servers."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import sync_playwright

from test_notebooks import ROOT, toc_files

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FORMULA = re.compile(r'class="(?:[^"]* )?math notranslate nohighlight[ "]')
FAILED = re.compile(r'<g [^>]*data-mml-node="merror"')
TYPESET = "async () => { await window.MathJax?.startup?.promise }"


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def serve(folder):
    """The address of a server of `folder`, which ends with the tests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def browser_path(playwright):
    """The system's Chromium or Chrome, or else playwright's; without one skip, in CI fail."""
    own = playwright.chromium.executable_path
    for found in (*map(shutil.which, BROWSERS), own if Path(own).is_file() else None):
        if found:
            return found
    reason = (
        f"no browser ({', '.join(BROWSERS)}) on PATH; install one, or run "
        "`.venv/bin/playwright install --with-deps chromium`, and then this again"
    )
    pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="module")
def look():
    """`look(server, page)`: the document after its scripts have run, and the addresses on other
    servers that it asked for, of which it gets none."""
    nowhere = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        found = browser_path(playwright)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", nowhere])
        tab, asked = browser.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))

        def look(server, page):
            asked.clear()
            tab.goto(f"{server}/{page}.html")
            tab.evaluate(TYPESET)
            here = (server, "data:", "blob:")
            return tab.content(), [url for url in asked if not url.startswith(here)]

        yield look
        browser.close()


def formula_problems(source, document):
    """What went wrong between a page's `source` and its rendered `document`."""
    wanted = len(FORMULA.findall(source))
    got = Counter(re.findall(r'<mjx-container[^>]* jax="(\w+)"', document))["SVG"]
    if got != wanted:
        yield f"{got} of {wanted} formulas rendered"
    if failed := FAILED.findall(document):
        yield f"{len(failed)} formulas with an error"


@pytest.fixture(scope="module")
def book_server(html):
    return serve(html)


@pytest.mark.parametrize("page", toc_files(ROOT))
def test_page_renders(page, html, book_server, look):
    document, elsewhere = look(book_server, page)
    assert list(formula_problems((html / f"{page}.html").read_text(), document)) == []
    assert elsewhere == []


@pytest.fixture
def broken(html, tmp_path):
    """Serve one page, `a`, with MathJax as the book loads it and the given body."""

    def write(body):
        head = re.search(
            r"<script>window\.MathJax.*?</script>", (html / "book/index.html").read_text()
        )[0]
        shutil.copyfile(html / "_static/mathjax/tex-svg-full.js", tmp_path / "mathjax.js")
        source = f'<html><head>{head}<script src="mathjax.js"></script></head>{body}</html>'
        (tmp_path / "a.html").write_text(source)
        return serve(tmp_path), source

    return write


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        (r"\(x^2\)", []),
        (r"\(\nosuchcommand\)", ["1 formulas with an error"]),
        (r"\(x^2^3\)", ["1 formulas with an error"]),
        (r"\[x^2", ["0 of 1 formulas rendered"]),
    ],
)
def test_broken_formula_is_noticed(broken, look, formula, problem):
    server, source = broken(f'<span class="math notranslate nohighlight">{formula}</span>')
    document, _ = look(server, "a")
    assert list(formula_problems(source, document)) == problem


def test_what_is_asked_of_others_is_noticed(broken, look):
    style = "<style>body { background: url(https://y.test/b.png) }</style>"
    server, _ = broken(f'{style}<script src="https://x.test/a.js"></script>')
    _, elsewhere = look(server, "a")
    assert sorted(elsewhere) == ["https://x.test/a.js", "https://y.test/b.png"]


LOOKS = """
from playwright.sync_api import sync_playwright
from test_browser import browser_path
def test_a():
    with sync_playwright() as playwright:
        browser_path(playwright)
def test_b():
    test_a()
"""


def run_without_browser(folder, *options, **environment):
    """A run of two tests that need a browser, on a machine that has none."""
    (folder / "test_looks.py").write_text(LOOKS)
    shutil.copy(ROOT / "conftest.py", folder)
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    empty = {"PATH": str(folder), "PLAYWRIGHT_BROWSERS_PATH": str(folder)}
    path = os.pathsep.join(str(ROOT / name) for name in ("tests", "src"))
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", *options, "."]
    return subprocess.run(
        command,
        cwd=folder,
        env=kept | empty | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_last_line_says_what_a_missing_browser_left_out(tmp_path, options):
    run = run_without_browser(tmp_path, *options)
    assert run.returncode == 0, run.stdout
    *_, stats, last = run.stdout.splitlines()
    assert "2 skipped" in stats
    assert last.startswith("NOT TESTED: test_looks.py, 2 tests: no browser")
    assert "`.venv/bin/playwright install --with-deps chromium`" in last


def test_missing_browser_fails_in_ci(tmp_path):
    run = run_without_browser(tmp_path, CI="true")
    assert run.returncode == 1, run.stdout
    assert "2 failed" in run.stdout
    assert "NOT TESTED" not in run.stdout
