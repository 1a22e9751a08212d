"""Every built page in a headless browser: formulas render, and the page asks for nothing elsewhere.

A server on the loopback address sends the pages with a policy that forbids every other origin, and
collects the browser's reports of what the policy stopped.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from test_notebooks import ROOT, toc_files

POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; report-uri /policy-report"
FORMULA = re.compile(r'class="(?:[^"]* )?math notranslate nohighlight[ "]')
FAILED = re.compile(r'<g [^>]*data-mml-node="merror"')


class Handler(SimpleHTTPRequestHandler):
    """Files with the policy in their head; reports of its violation go to `server.stopped`."""

    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def do_POST(self):
        self.server.stopped.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def serve(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    server.stopped = []
    Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """`dump(address)`: the page's document after its scripts have run."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        reason = f"no browser: none of {', '.join(names)} is installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", "--disable-dev-shm-usage", "--virtual-time-budget=30000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += [f"--user-data-dir={tmp_path_factory.mktemp('browser')}", "--dump-dom"]

    def dump(address):
        run = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout

    return dump


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
    server = serve(html)
    yield server
    server.shutdown()


@pytest.mark.parametrize("page", toc_files(ROOT))
def test_page_renders(page, html, book_server, dump):
    document = dump(f"http://127.0.0.1:{book_server.server_port}/{page}.html")
    assert list(formula_problems((html / f"{page}.html").read_text(), document)) == []
    assert book_server.stopped == []


@pytest.fixture
def broken(html, tmp_path):
    """Serve one page with MathJax as the book loads it and the given body."""
    servers = []

    def write(body):
        head = re.search(
            r"<script>window\.MathJax.*?</script>", (html / "book/index.html").read_text()
        )[0]
        shutil.copyfile(html / "_static/mathjax/tex-svg-full.js", tmp_path / "mathjax.js")
        source = f'<html><head>{head}<script src="mathjax.js"></script></head>{body}</html>'
        (tmp_path / "a.html").write_text(source)
        servers.append(serve(tmp_path))
        return servers[-1], source

    yield write
    for server in servers:
        server.shutdown()


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        (r"\(x^2\)", []),
        (r"\(\nosuchcommand\)", ["1 formulas with an error"]),
        (r"\(x^2^3\)", ["1 formulas with an error"]),
        (r"\[x^2", ["0 of 1 formulas rendered"]),
    ],
)
def test_broken_formula_is_noticed(broken, dump, formula, problem):
    server, source = broken(f'<span class="math notranslate nohighlight">{formula}</span>')
    document = dump(f"http://127.0.0.1:{server.server_port}/a.html")
    assert list(formula_problems(source, document)) == problem


def test_script_from_elsewhere_is_noticed(broken, dump):
    server, _ = broken('<script src="https://x.test/a.js"></script>')
    dump(f"http://127.0.0.1:{server.server_port}/a.html")
    assert any("x.test" in report for report in server.stopped)
