"""A verdict: what it says, as JSON and on a terminal."""

import json
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

STATUSES = ("safe", "not covered", "not safe")
"""From the best to the worst."""


@dataclass(frozen=True)
class Finding:
    """One thing that decides: a status, why, and the statements of the book it rests on."""

    status: str
    text: str
    statements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """What T/K can be. `bounds` has (tokens, T/K): no more than that if every micro-batch routes so
    many tokens; None for micro-batches of fewer tokens than CP ranks, of which none is counted.
    `exact` is (T, K, T/K) for given lengths."""

    bounds: tuple[tuple[int, Fraction | None], ...]
    exact: tuple[int, int, Fraction] | None = None


@dataclass(frozen=True)
class Outcome:
    """What happens in one regime. `runs` is False if verl raises."""

    regime: str
    runs: bool
    findings: tuple[Finding, ...]
    ratio: Ratio | None

    @property
    def status(self) -> str:
        """The worst of the findings'."""
        return max((f.status for f in self.findings), key=STATUSES.index)


@dataclass(frozen=True)
class Verdict:
    """The answer: facts by name, why the regime is what it is, an outcome for each regime that is
    possible, the book's statements that they rest on with title and status, and what verl itself
    refuses in the configuration, though it has no bearing on the outcomes."""

    versions: dict[str, str | None]
    path: dict[str, str | int | bool | None]
    why: str
    outcomes: tuple[Outcome, ...]
    statements: dict[str, tuple[str, str]]
    refused: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The worst of the outcomes'."""
        return max((o.status for o in self.outcomes), key=STATUSES.index)

    @property
    def exit_status(self) -> int:
        """2 if verl refuses the configuration, else 0 if safe and 1 if not."""
        if self.refused:
            return 2
        return 0 if self.status == "safe" else 1

    def to_json(self) -> str:
        """The verdict as JSON; a ratio is a number with its exact fraction beside it."""
        return json.dumps(
            {
                "status": self.status,
                "exit_status": self.exit_status,
                "refused": self.refused,
                "versions": self.versions,
                "path": self.path,
                "regime": {"possible": [o.regime for o in self.outcomes], "why": self.why},
                "outcomes": [_outcome_to_dict(o) for o in self.outcomes],
                "statements": [
                    {"label": label, "title": title, "status": status}
                    for label, (title, status) in self.statements.items()
                ],
            },
            indent=2,
        )


def _outcome_to_dict(outcome):
    ratio = outcome.ratio and {
        "bounds": [
            {"tokens": t, "T/K": b and float(b), "fraction": b and str(b)}
            for t, b in outcome.ratio.bounds
        ],
        "exact": outcome.ratio.exact
        and {
            "T": outcome.ratio.exact[0],
            "K": outcome.ratio.exact[1],
            "T/K": float(outcome.ratio.exact[2]),
            "fraction": str(outcome.ratio.exact[2]),
        },
    }
    return {
        "regime": outcome.regime,
        "status": outcome.status,
        "runs": outcome.runs,
        "findings": [vars(f) for f in outcome.findings],
        "ratio": ratio,
    }


COLOURS = {"safe": "green", "not covered": "yellow", "not safe": "red"}
MEANS = {
    "safe": "the optimizer sees the gradient of the configured loss, up to the factor T/K",
    "not covered": "the book does not say, for the reasons marked ?",
    "not safe": "for the reasons marked -",
}
REFUSES = "verl itself refuses this configuration"
MARKS = {"safe": "+", "not covered": "?", "not safe": "-"}


def show(verdict: Verdict) -> None:
    """Print the verdict, in colours if stdout is a terminal that takes them."""
    console = terminal()
    _show_head(console, verdict)
    releases = (f"{name} {v or 'not installed'}" for name, v in verdict.versions.items())
    console.print(Text(", ".join(releases), "dim"), "", sep="\n")
    facts = [(name, _word(value)) for name, value in verdict.path.items()]
    facts.append(("regime", f"{' or '.join(o.regime for o in verdict.outcomes)}: {verdict.why}"))
    console.print(_table(facts))
    for outcome in verdict.outcomes:
        _show_findings(console, outcome)
        if outcome.ratio:
            _show_ratio(console, outcome.ratio)
    if verdict.statements:
        rows = ((label, *entry) for label, entry in verdict.statements.items())
        console.print("", _table(rows, "statement of the book", "it says", "status"), sep="\n")


def show_findings(verdict: Verdict) -> None:
    """Print the verdict's status and what it rests on, as `show` does, and no more."""
    console = terminal()
    _show_head(console, verdict)
    for outcome in verdict.outcomes:
        _show_findings(console, outcome)


def terminal() -> Console:
    """Stdout, of 100 columns where it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    return console


def _show_head(console, verdict):
    head = Text(verdict.status.upper(), f"bold {COLOURS[verdict.status]}")
    worst, *others = sorted(verdict.outcomes, key=lambda o: -STATUSES.index(o.status))
    where = "".join(
        f", {o.status} in the {o.regime} regime" for o in others if o.status != worst.status
    )
    where = where and f" in the {worst.regime} regime{where}"
    console.print(head.append(f"{where}: {MEANS[verdict.status]}", "not bold"))
    if verdict.refused:
        console.print(Text(f"{REFUSES}:", "bold red"))
        console.print(_table(("-", text) for text in verdict.refused))


def _show_findings(console, outcome):
    title = f"In the {outcome.regime} regime: {outcome.status}"
    console.print("", Text(title, f"bold {COLOURS[outcome.status]}"), sep="\n")
    marks = ((Text(MARKS[f.status], COLOURS[f.status]), f.text) for f in outcome.findings)
    console.print(_table(marks))


def _show_ratio(console, ratio):
    rows = [
        (str(t), "no bound: none is counted" if b is None else f"{float(b):.6f}")
        for t, b in ratio.bounds
    ]
    head = "if every micro-batch has at least so many tokens", "T/K is at most"
    console.print("", _table(rows, *head), sep="\n")
    if ratio.exact:
        T, K, value = ratio.exact
        console.print(
            f"With the lengths given: T = {T}, K = {K}, T/K = {value} = {float(value):.6f}"
        )


def _table(rows, *heads):
    table = Table(box=None, show_header=bool(heads), pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) if type(cell) is str else cell for cell in row))
    return table


def _word(value):
    if type(value) is bool:
        return "yes" if value else "no"
    return "not said" if value is None else str(value)
