"""What nbval does not compare, the built book for its tests, and last lines on what was skipped."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

# Pictures, those of `glue` too, and warnings; plain PNG is left out by nbval itself.
NOT_COMPARED = ("image/svg+xml", "application/papermill.record/image/png", "stderr")

gc.disable()  # until torch, verl and Megatron-Core are imported: a good deal to look at


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    collected = yield
    for node in collected:
        if hasattr(node, "skip_compare"):
            node.skip_compare += NOT_COMPARED
    return collected


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """The last lines, behind pytest's own: what was not tested, and why."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = Counter(
        (report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in skipped
    )
    for (path, reason), count in reasons.items():
        reporter.write_line(f"NOT TESTED: {path}, {count} test{'s' * (count > 1)}: {reason}")
    return result


@pytest.fixture(scope="session")
def html():
    """The built book, which `make test` builds before the tests."""
    folder = Path(__file__).parent / "_build/html"
    if not (folder / "book/index.html").is_file():
        reason = "_build/html is missing; run `make book` first"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return folder
