"""Examine a release of verl, Megatron-Core or Megatron-Bridge for `cpnorm.examined`.

    python -m cpnorm.examine [FOLDER]

looks at the installed releases, or at those unpacked in FOLDER. Of one that was not examined it
prints the functions that differ from the nearest release that was, which a person must read first,
and then what to add. Facts are proposals; "?" is one that could not be read. Nothing is imported.
"""

import ast
import sys
from pathlib import Path

from cpnorm.examined import (
    CONFIGURED,
    CORE_ALGOS,
    FACTS,
    Bridge,
    Megatron,
    Row,
    Verl,
    changed,
    nearest,
    rows,
)
from cpnorm.fingerprint import Sources

WORDS = {
    "counts": "reports a token count:",
    "guard": "refuses seq-mean-token-mean:",
    "refuses_bshd": "refuses BSHD:",
    "modes": "losses aggregate",
    "dynamic_groups": "has dynamic CP groups:",
    "aux": "per token, the auxiliary loss is multiplied by",
    "measured": "measured at (CP, TP)",
    "per_token": "turns calculate_per_token_loss on at CP above 1 in",
}
"""What a field of the facts says."""

ENGINE = "verl.workers.engine.megatron.transformer_impl"


def facts(distribution: str, seen: Sources) -> Verl | Megatron | Bridge:
    """What the sources say. Of the auxiliary loss, which is measured, they say nothing."""
    if distribution == "verl":
        core = seen.module(CORE_ALGOS)
        modes = {loss: _mode(seen, loss) for loss in (core.losses() if core else ())}
        others = {loss: mode for loss, mode in modes.items() if mode != CONFIGURED}
        return Verl(*_engine(seen), others)
    if distribution == "megatron-core":
        return Megatron(_dynamic_groups(seen))
    return Bridge(_providers(seen))


def table(distribution: str, version: str, seen: Sources) -> str:
    """The table with a column for `seen`, which takes the place of one of the same version."""
    every = list(rows(distribution))
    if distribution == "verl" and (core := seen.module(CORE_ALGOS)):
        known = {row.name for row in every}
        new = [f"policy loss {loss}" for loss in core.losses()]
        at = next(i for i, row in enumerate(every) if row.part == "policy loss") + 1
        while at < len(every) and every[at].name.startswith("policy loss "):
            at += 1
        every[at:at] = [Row(name, CORE_ALGOS, name, {}) for name in new if name not in known]
    versions = [v for v in FACTS[distribution] if v != version] + [version]
    lines, part = [("functions", versions)], None
    for row in every:
        if row.part != part and not row.name:
            part = row.part
            lines.append((f"# {part}", ()))
        prints = row.prints | {version: seen.fingerprint(row.module, row.name)}
        name = f"  {row.name}" if row.name else row.module
        lines.append((name, [prints.get(v) or "-" for v in versions]))
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        " ".join([name.ljust(width), *(p.ljust(8) for p in prints)]).rstrip()
        for name, prints in lines
    )


def report(distribution: str, seen: Sources) -> str:
    """What to read and what to add, in words; one line if the release is as it was examined."""
    version = seen.version(distribution) or "?"
    release = f"{distribution} {version}"
    examined = version in FACTS[distribution]
    near = version if examined else nearest(distribution, seen)
    found = changed(distribution, near, seen)
    if examined and not found:
        return f"{release} is as it was examined.\n"
    lines = [f"{release} is not as it was examined. Functions that differ:"]
    if not examined:
        lines = [f"{release} was not examined. Read first what differs from {near}:"]
    lines += [f"  {one.module} {one.name}, for {one.part}" for one in found] or ["  nothing"]
    if not examined:
        lines += ["", f'Add to FACTS["{distribution}"] in cpnorm/examined.py, once it is true:']
        lines += [f'  "{version}": {facts(distribution, seen)!r},']
        lines += ["", f'Put in place of TABLES["{distribution}"]:']
        lines += [table(distribution, version, seen)]
    return "\n".join([*lines, ""])


def listed() -> list[dict]:
    """The releases that were examined, and installed ones that were not.

    Each a dict: `distribution`, `version`, `facts` (None for one that was not examined), the number
    of `functions` held, whether it is `installed`, and `differs`, names of functions that are not
    as they were examined (None for one that is not installed).
    """
    seen, found = Sources(), []
    for distribution, known in FACTS.items():
        installed = seen.version(distribution)
        for version in dict.fromkeys([*known, *filter(None, [installed])]):
            near = version if version in known else nearest(distribution, seen)
            here = version == installed
            differs = [one.name for one in changed(distribution, near, seen)] if here else None
            found.append(
                {
                    "distribution": distribution,
                    "version": version,
                    "facts": known[version]._asdict() if version in known else None,
                    "functions": sum(
                        bool(r.name and r.prints.get(version)) for r in rows(distribution)
                    ),
                    "installed": here,
                    "differs": differs,
                }
            )
    return found


def in_words(one: dict) -> str:
    """An entry of `listed` as two lines."""
    state = "not installed"
    if one["facts"] is None:
        state = "installed, was not examined"
    elif one["installed"]:
        state = "installed, as examined"
        if one["differs"]:
            state = f"installed, differs from what was examined: {', '.join(one['differs'])}"
    head = f"{one['distribution']} {one['version']}: {state}"
    if one["facts"] is None:
        return head
    facts = (f"{WORDS[name]} {_word(value)}" for name, value in one["facts"].items())
    return f"{head}\n  {one['functions']} functions; {'; '.join(facts)}"


def _word(value):
    if isinstance(value, dict):
        modes = (f"{name} {mode or 'of its own'}" for name, mode in value.items())
        return f"as configured, but {', '.join(modes)}"
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value) or "nowhere"
    return {True: "yes", False: "no", None: "not measured"}.get(value, value)


def main(folder: str | None = None) -> None:
    """Print the report on each release that is installed, or unpacked in `folder`."""
    seen = Sources(Path(folder) if folder is not None else None)
    present = [d for d in FACTS if any(seen.fingerprint(row.module) for row in rows(d))]
    if not present:
        raise SystemExit(f"{folder} has none of {', '.join(FACTS)}")
    for distribution in present:
        print(report(distribution, seen))


def _engine(seen):
    """Whether `postprocess_micro_batch_func` reports a count, has the guard, refuses BSHD."""
    found = [
        node
        for owner in seen.tree(ENGINE).body
        if isinstance(owner, ast.ClassDef) and owner.name == "MegatronEngineWithLMHead"
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == "postprocess_micro_batch_func"
    ]
    nodes = [n for function in found for n in ast.walk(function)]
    returned = [n.value for n in nodes if isinstance(n, ast.Return)]
    if not returned or not all(isinstance(value, ast.Tuple) for value in returned):
        return "?", "?", "?"
    return (
        any(len(value.elts) == 3 for value in returned),
        any(isinstance(n, ast.Compare) and "seq-mean-token-mean" in _strings(n) for n in nodes),
        any(
            isinstance(n, ast.Raise) and any("use_remove_padding" in s for s in _strings(n))
            for n in nodes
        ),
    )


def _mode(seen, loss):
    """The mode in which a loss aggregates, as its calls with `loss_agg_mode` say it."""
    given = []
    calls = (
        call
        for node in seen.tree(CORE_ALGOS).body
        if isinstance(node, ast.FunctionDef)
        if any(isinstance(d, ast.Call) and _strings(d) == [loss] for d in node.decorator_list)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    )
    for call in calls:
        named = [k.value for k in call.keywords if k.arg == "loss_agg_mode"]
        if getattr(call.func, "id", "") == "agg_loss" and not named:
            return "?"
        if any(isinstance(a, ast.Name) and a.id == "loss_agg_mode" for a in call.args):
            return "?"
        given += [v.value if isinstance(v, ast.Constant) else CONFIGURED for v in named]
    return {0: None, 1: given and given[0]}.get(len(set(given)), "?")


def _dynamic_groups(seen):
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == "initialize_model_parallel"
        and "dynamic_context_parallel" in [a.arg for a in node.args.args + node.args.kwonlyargs]
        for node in seen.tree("megatron.core.parallel_state").body
    )


def _providers(seen):
    """Classes that set `calculate_per_token_loss` themselves."""
    return tuple(
        owner.name
        for module in dict.fromkeys(row.module for row in rows("megatron-bridge"))
        for owner in seen.tree(module).body
        if isinstance(owner, ast.ClassDef)
        and any(
            isinstance(n, ast.Attribute)
            and n.attr == "calculate_per_token_loss"
            and isinstance(n.ctx, ast.Store)
            for n in ast.walk(owner)
        )
    )


def _strings(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str]


if __name__ == "__main__":
    main(*sys.argv[1:2])
