"""What the installed verl and Megatron-Core do with a step, as far as they were examined.

A fact comes from `cpnorm.examined`, by version, and holds only where `differences` finds none.
Nothing of theirs is imported: their files are read.
"""

import ast
import functools
import sys
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import yaml

from cpnorm import examined
from cpnorm.examined import AUX, AUX_RULES, CONFIGURED, EVERY, FACTS, REGIME
from cpnorm.fingerprint import Sources
from cpnorm.sources import folder, parsed

EXAMINED = tuple(FACTS["verl"])
"""Releases of verl that were examined."""

SHOWN = 3
"""Functions that differ, of one distribution, that `differences` names."""

TRAINERS = ("ppo_megatron_trainer", "ppo_trainer")
"""Trainer configurations that verl's wheel has composed, in files of its own."""


class Engine(NamedTuple):
    """What verl's `postprocess_micro_batch_func` does under `calculate_per_token_loss=True`.

    Whether it reports a token count (0.8.0 does not), refuses `seq-mean-token-mean` (0.9.0), and
    refuses the BSHD layout (0.9.0 and 0.9.1).
    """

    counts: bool
    guard: bool
    refuses_bshd: bool


def versions() -> dict[str, str | None]:
    """Versions of the installed distributions, None for one that is not installed."""
    return {name: _version(name) for name in FACTS}


def differences(loss: str) -> tuple[str, ...]:
    """Why nothing is known of a verdict on policy loss `loss`, in sentences; empty where all is.

    verl and Megatron-Core must be of an examined version, and the functions that a verdict rests
    on as they were there. A version that nobody examined differs, whatever its functions are.
    """
    name = f"policy loss {loss}"
    found = _differences("verl", (EVERY, name)) + _differences("megatron-core", (EVERY,))
    version = versions()["verl"]
    if version in EXAMINED and loss not in examined.losses(version):
        found += (f"{name} of verl {version} was not examined",)
    return found


def bridge_differences() -> tuple[str, ...]:
    """As `differences`, for the providers of Megatron-Bridge that choose the regime.

    Empty where Megatron-Bridge is not installed: then nothing is known of it, but nothing differs.
    """
    present = versions()["megatron-bridge"] is not None
    return _differences("megatron-bridge", (REGIME,)) if present else ()


def engine() -> Engine:
    """Of the installed verl. `ValueError` for a version that was not examined."""
    facts = _facts("verl")
    return Engine(facts.counts, facts.guard, facts.refuses_bshd)


def aggregated(loss: str, mode: str) -> str | None:
    """The mode in which a policy loss really aggregates when `mode` is configured.

    None for a loss that aggregates in a way of its own. `ValueError` for a version of verl, or a
    loss, that was not examined.
    """
    modes = _facts("verl").modes
    known = examined.losses(versions()["verl"])
    if loss not in known:
        raise ValueError(f"loss is {loss!r}, examined are {', '.join(known)}")
    real = modes.get(loss, CONFIGURED)
    return mode if real == CONFIGURED else real


def aux_factor(cp: int, tp: int) -> str | None:
    """What the installed Megatron-Core makes of the auxiliary loss in the per-token regime.

    An exact fraction, such as "1/4", against the unsharded run, where no sequence needs padding and
    K = T. None at sizes, or in a release, where it was not measured.
    """
    facts = FACTS["megatron-core"].get(versions()["megatron-core"])
    if facts is None or (cp, tp) not in facts.measured or _differences("megatron-core", (AUX,)):
        return None
    return str(AUX_RULES[facts.aux](Fraction(cp), Fraction(tp)))


def has_dynamic_groups() -> bool:
    """Whether Megatron-Core's `initialize_model_parallel` takes `dynamic_context_parallel`.

    `ValueError` for a version that was not examined.
    """
    return _facts("megatron-core").dynamic_groups


@functools.cache
def fields(module: str, *owners: str) -> frozenset[str]:
    """Fields that the dataclasses `owners` in a module declare themselves."""
    body = parsed(module).body
    found = [n for n in body if isinstance(n, ast.ClassDef) and n.name in owners]
    return frozenset().union(*map(_fields, found))


def declared(target: str) -> frozenset[str]:
    """Fields of the dataclass of the installed verl that a `_target_` names, inherited ones too.

    Empty where it names none.
    """
    return frozenset(_declared(folder("verl"), target))


def knows(key: str) -> bool:
    """Whether one of verl's own trainers has a dotted configuration key."""
    return _knows(folder("verl"), key)


def other_releases(key: str) -> tuple[str, ...]:
    """Releases of verl that know a dotted configuration key, of those in `.venv/releases` but for
    the installed one, oldest first.

    A release knows a key of its trainer's configuration, Megatron's or FSDP's, and a field of the
    dataclass that a section there names.
    """
    folders = sorted(Path(sys.prefix, "releases").glob("verl-*"))
    found = {f.name.removeprefix("verl-"): f / "verl" for f in folders}
    found.pop(versions()["verl"], None)
    return tuple(release for release, verl in found.items() if _knows(verl, key))


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _facts(distribution):
    version, known = versions()[distribution], FACTS[distribution]
    if version not in known:
        raise ValueError(f"{distribution} is {version}, examined are {', '.join(known)}")
    return known[version]


def _differences(distribution, parts):
    """Sentences on the installed release of a distribution, for parts of a verdict."""
    version = versions()[distribution]
    if version is None:
        return (f"{distribution} is not installed",)
    known, found = FACTS[distribution], []
    if version not in known:
        found.append(f"{distribution} {version} was not examined, examined are {', '.join(known)}")
    seen = Sources()
    near = version if version in known else examined.nearest(distribution, seen)
    names = [one.name for one in examined.changed(distribution, near, seen, parts)]
    what = f"of {distribution} {version} differs from what was examined"
    found += [f"{name} {what}" for name in names[:SHOWN]]
    if more := names[SHOWN:]:
        what = what if len(more) == 1 else what.replace("differs", "differ")
        found.append(f"{len(more)} more function{'s' if len(more) > 1 else ''} {what}")
    return tuple(found)


def _knows(verl, key):
    """Whether the release whose package `verl` is has a dotted key in either trainer."""
    *sections, last = key.split(".")
    for name in TRAINERS:
        config = _trainer(verl / f"trainer/config/_generated_{name}.yaml")
        for section in sections:
            config = config.get(section) if isinstance(config, dict) else None
        if isinstance(config, dict) and (
            last in config or last in _declared(verl, str(config.get("_target_", "")))
        ):
            return True
    return False


@functools.cache
def _trainer(file):
    """A trainer's configuration as verl's wheel has it, composed; empty where it has none."""
    return yaml.load(file.read_text(), yaml.CSafeLoader) if file.is_file() else {}


@functools.cache
def _declared(verl, target):
    """Fields of the dataclass that a dotted name of verl means, inherited ones too, none where it,
    or a class of verl's that it inherits from, is not to be found."""
    package, _, name = target.rpartition(".")
    if not package.startswith("verl"):
        return set()
    classes, imported = _names(Path(verl.parent, *package.split(".")))
    if name not in classes:
        return _declared(verl, imported[name]) if imported.get(name, target) != target else set()
    found = _fields(classes[name])
    for base in map(ast.unparse, classes[name].bases):
        if base in classes or imported.get(base, "").startswith("verl."):
            inherited = _declared(verl, f"{package}.{base}")
            if not inherited:
                return set()
            found |= inherited
    return found


@functools.cache
def _names(place):
    """Classes of a module, or of all modules of a package, and what they import by name."""
    classes, imported = {}, {}
    for file in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        for node in ast.parse(file.read_text()).body if file.is_file() else ():
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return classes, imported


def _fields(owner):
    fields = (n.target for n in owner.body if isinstance(n, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}
