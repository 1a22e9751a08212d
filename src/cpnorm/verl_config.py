"""A launch's configuration, composed by Hydra as verl's trainer does it, and checked.

Hydra composes the files of the installed verl and the user's values and overrides. Tags and anchors
are refused, so a file can name no Python object, and what a `_target_` names is not imported.
"""

import contextlib
import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpnorm import bearing, installed
from cpnorm.launch import FULLY_ASYNC, TRAINERS, Launch
from cpnorm.settings import PER_TOKEN, ROOT, Settings, check
from cpnorm.sources import folder
from cpnorm.user_file import one_line, short

SECTIONS = (f"{ROOT}.actor", f"{ROOT}.model", f"{ROOT}.rollout")
"""Sections that every worker makes dataclasses of, with all that lies in them."""

ENGINES = tuple(f"{section}.megatron" for section in (f"{ROOT}.actor", f"{ROOT}.ref", "critic"))
"""Sections that are there with `model_engine=megatron` alone."""

LOG_PROB = "log_prob_micro_batch_size"
USER = "cpnorm_user"  # the name under which Hydra finds the user's values
ADVICE = "write the composed configuration to a file with --cfg job and give that"
NO_ACTOR = (
    f"the file has no mapping {ROOT!r} and no mapping 'actor': cpnorm judges the policy loss of an "
    "actor, no SFT, reward or evaluation configuration"
)
SURE = 0.9  # likeness at which a key is taken for another, misspelled


@dataclass(frozen=True)
class Configuration:
    """What a verdict needs of a launch: its settings; a sentence for each key that verl itself
    refuses and that has no bearing on normalisation; keys that the book has not looked at, with a
    sentence, see `bearing.unexamined`; and those taken to compute the same gradient in another
    way."""

    settings: Settings
    refused: tuple[str, ...] = ()
    unexamined: dict[str, str] = field(default_factory=dict)
    neutral: tuple[str, ...] = ()


class Refusal(NamedTuple):
    """A key that verl refuses, and a sentence that says so."""

    key: str
    text: str


def load(launch: Launch) -> Configuration:
    """The configuration with which verl's trainer would run `launch`.

    `ValueError`, one sentence without its full stop, for anything that verl or this module cannot
    use. Keys that verl refuses are named all at once.
    """
    parsed = _parse(launch.overrides)
    values = [o for o in parsed if not _is_group(o)]
    groups = [o.input_line for o in parsed if _is_group(o)]
    primary, mine = _primary(launch, groups)
    try:
        config, refusals = _composed(launch, primary, groups, values)
        if not isinstance(config.get(ROOT), DictConfig):
            raise ValueError(NO_ACTOR)
        refusals = list(dict.fromkeys([*refusals, *_unknown_keys(config)]))
        if any(not bearing.is_without(r.key) for r in refusals):
            texts = "; ".join(r.text for r in refusals)
            raise ValueError(f"verl itself refuses this configuration: {texts}")
        _near_misses(config)
        given = frozenset(_leaves(mine)) | {
            key for o in values for key in _leaves(o.value(), o.key_or_group)
        }
        found = _values(config, launch)
        settings = Settings(**found, module=launch.module, given=given, unknown=launch.unknown)
        check(settings)
        refusals += _refused_values(config, settings, launch.is_whole)
        unexamined, neutral = bearing.unexamined(config, settings)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        why = one_line(error).partition("Config search path")[0].strip(" .")
        raise ValueError(f"the configuration does not compose: {why}") from error
    return Configuration(settings, tuple(r.text for r in refusals), unexamined, neutral)


# What Hydra composes


def _primary(launch, groups):
    """Name of the config to compose from, and the user's own values in it."""
    if launch.values is None:
        return launch.config_name or TRAINERS[launch.module].config_name, {}
    data = {key: value for key, value in launch.values.items() if key != "hydra"}
    if ROOT not in data and "actor" in data:
        data = {ROOT: {k: v for k, v in data.items() if k != "defaults"}} | {
            k: v for k, v in data.items() if k == "defaults"
        }
    if "defaults" not in data:
        _check_parts(data)
        if ROOT not in data:
            raise ValueError(NO_ACTOR)
        chosen = any(group.lstrip("+").startswith("model_engine=") for group in groups)
        engine = None if chosen else _model_engine(data)
        override = [{"override model_engine": engine}] if engine else []
        base = TRAINERS[launch.module].config_name
        data = {"defaults": [base, *override, "_self_"], **data}
    elif not isinstance(data["defaults"], list):
        raise ValueError(f"defaults is {short(data['defaults'])}, allowed is a list")
    ConfigStore.instance().store(USER, OmegaConf.create(data), provider="cpnorm")
    return USER, {key: value for key, value in data.items() if key != "defaults"}


def _check_parts(data):
    part = data.get(ROOT, {})
    if not isinstance(part, dict):
        raise ValueError(f"{ROOT} is {short(part)}, allowed is a mapping")
    if part and part.keys() <= {"desc", "value"}:
        raise ValueError(
            f"{ROOT} holds {' and '.join(part)}, as in a file that wandb wrote: give the run's "
            ".hydra/config.yaml"
        )
    if part and not isinstance(part.get("actor", {}), dict):
        raise ValueError(f"{ROOT}.actor is {short(part['actor'])}, allowed is a mapping")


def _model_engine(mine):
    """The `model_engine` that a file speaks of: its key, or what it says about the actor."""
    if mine.get("model_engine") is not None:
        engine = mine["model_engine"]
        engines = sorted(p.stem for p in (folder("verl") / "trainer/config/model_engine").iterdir())
        if engine not in engines:
            raise ValueError(f"model_engine is {short(engine)}, allowed is {', '.join(engines)}")
        return engine
    actor = mine[ROOT].get("actor") or {}
    return "megatron" if "megatron" in (actor.get("strategy"), *actor) else None


def _parse(overrides):
    """Hydra's parsed overrides, its own left out. `ValueError` for one that is none."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError) as error:
            raise ValueError(f"{short(text)} is not an override such as key=value") from error
        if override.is_sweep_override():
            raise ValueError(f"{short(text)} is a sweep of Hydra's, allowed is one value")
        if not override.key_or_group.split("/")[0].startswith("hydra"):
            parsed.append(override)
    return parsed


def _is_group(override):
    return override.package is not None or override.key_or_group in _groups()


@functools.cache
def _groups():
    """Config groups of verl's trainer."""
    config = folder("verl") / "trainer/config"
    return frozenset(p.name for p in config.iterdir() if any(p.glob("*.yaml")))


def _compose(launch, primary, overrides):
    """Hydra's composition from the folders of verl's trainers, the trainer's own first."""
    own = folder("verl") / TRAINERS[launch.module].config_path
    paths = [folder("verl") / "trainer/config", *([launch.folder] if launch.folder else [])]
    search = ",".join(f"'file://{_escaped(path)}'" for path in paths)
    with initialize_config_dir(str(own), version_base=None):
        return compose(primary, overrides=[*overrides, f"hydra.searchpath=[{search}]"])


def _escaped(path):
    return str(path).replace("\\", "\\\\").replace("'", "\\'")


def _composed(launch, primary, groups, values):
    """The composed configuration, and a `Refusal` for each override that Hydra refuses in it."""
    if all(o.is_add() or o.is_force_add() or installed.knows(o.key_or_group) for o in values):
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            return _compose(launch, primary, [*groups, *(o.input_line for o in values)]), []
    # Each override alone, to name all that are refused.
    refusals, accepted = [], []
    before = _compose(launch, primary, groups)
    for override in values:
        if refusal := _why_refused(override, before):
            refusals.append(refusal)
            continue
        accepted.append(override.input_line)
        if override.is_delete():
            parent, _, last = override.key_or_group.rpartition(".")
            OmegaConf.set_struct(before, False)
            node = OmegaConf.select(before, parent) if parent else before
            node.pop(last, None)
            OmegaConf.set_struct(before, True)
        else:
            key, value = override.key_or_group, override.value()
            OmegaConf.update(before, key, value, merge=True, force_add=True)
    return (before if refusals else _compose(launch, primary, [*groups, *accepted])), refusals


def _why_refused(override, config):
    """The `Refusal` with which Hydra meets an override of `config`, None if it takes it.

    A missing value, `???`, is there; `+` may fill a null and extend a mapping or a list.
    """
    key = override.key_or_group
    parent, _, last = key.rpartition(".")
    try:
        node = OmegaConf.select(config, parent) if parent else config
        there = isinstance(node, DictConfig) and last in list(node)
    except OmegaConfBaseException:
        node, there = None, False
    if override.is_force_add() or (there and not override.is_add()):
        return None
    if override.is_add():
        full = there and not OmegaConf.is_missing(node, last) and node[last] is not None
        if full and not isinstance(override.value(), dict | list):
            return Refusal(key, f"{key} is there already, write it without +")
        return None
    if node is None and parent in ENGINES:
        return _without_engine(parent)
    while node is None and parent:  # the mapping that is there, and the first name that is not
        parent, _, last = parent.rpartition(".")
        node = _mapping(config, parent)
    near = _near(last, node) if isinstance(node, DictConfig) else None
    return _no_key(key, near, closed=bool(_fields(node)))


def _mapping(config, key):
    """What is at `key`, None for nothing."""
    try:
        return OmegaConf.select(config, key) if key else config
    except OmegaConfBaseException:
        return None


def _fields(node):
    """Fields of the dataclass that verl makes of a mapping, none where it stays one."""
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    return installed.declared(target) if isinstance(target, str) else frozenset()


def _without_engine(section):
    return Refusal(section, f"{section} has no keys without model_engine=megatron")


def _no_key(key, near, closed):
    """That verl has no such key, which releases do, and what else to write. A section that is
    `closed` takes no key of one's own."""
    version = installed.versions()["verl"]
    others = installed.other_releases(key)
    text = f"{key} is no key of verl {version}"
    text += f", but of {' and '.join(others)}" if others else ""
    if near:
        text += f", did you mean {near!r}"
    elif not others and not closed:
        text += ", write + before it to add it"
    return Refusal(key, text)


# Keys and values


def _unknown_keys(config) -> Iterator[Refusal]:
    """Keys that no field takes of the dataclasses that verl makes of its sections."""
    if OmegaConf.select(config, f"{ROOT}.actor.strategy") != "megatron":
        return
    for section in SECTIONS:
        if not isinstance(node := OmegaConf.select(config, section), DictConfig):
            raise ValueError(f"{section} is {short(_plain(node))}, allowed is a mapping")
    if OmegaConf.select(config, ENGINES[0]) is None:
        yield _without_engine(ENGINES[0])
    sections = list(SECTIONS)
    if config.critic.get("enable") or (
        config.critic.get("enable") is None and config.algorithm.get("adv_estimator") == "gae"
    ):
        sections.append("critic")
    if config.algorithm.get("use_kl_in_reward") or config[ROOT].actor.get("use_kl_loss"):
        sections += [f"{ROOT}.ref.{name}" for name in ("megatron", "optim", "profiler")]
    for section in sections:
        yield from _unknown_in(OmegaConf.select(config, section), section)


def _unknown_in(node, name) -> Iterator[Refusal]:
    known = _fields(node)
    for key in node if isinstance(node, DictConfig) else ():
        if known and key not in known and key != "_target_":
            yield _no_key(f"{name}.{key}", _near(str(key), known), closed=True)
        elif not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)):
            yield from _unknown_in(node[key], f"{name}.{key}")


def _refused_values(config, s, whole) -> Iterator[Refusal]:
    """Values that verl's dataclasses and `validate_config` refuse before a run begins.

    `whole` is False for a part of a configuration, which need not have all that a run needs.
    """
    if s.strategy != "megatron":
        return
    rollout, ref = config[ROOT].rollout, config[ROOT].ref
    if rollout.get("mode") == "sync":
        key = f"{ROOT}.rollout.mode"
        yield Refusal(key, f"{key} is 'sync', allowed is 'async'")
    if whole and OmegaConf.is_missing(rollout, "name"):
        yield Refusal(f"{ROOT}.rollout.name", f"{ROOT}.rollout.name is not given")
    if s.dynamic_batch:
        return
    actor = f"{ROOT}.actor"
    if s.micro_batch is None and (whole or s.all_micro_batch):
        key = f"{actor}.ppo_micro_batch_size_per_gpu"
        yield Refusal(key, f"{key} is not given, verl needs it where use_dynamic_bsz is off")
    if s.module != FULLY_ASYNC and s.train_batch is not None and s.train_batch < s.mini_batch:
        key = "data.train_batch_size"
        if whole or s.is_given("train_batch"):
            text = f"{key} is {s.train_batch}, less than ppo_mini_batch_size, {s.mini_batch}"
            yield Refusal(key, text)
    needed = [("rollout", rollout)] if whole else []
    if whole and (s.use_kl_loss or config.algorithm.get("use_kl_in_reward")):
        needed.append(("ref", ref))
    for name, section in needed:
        key = f"{ROOT}.{name}.{LOG_PROB}_per_gpu"
        if not (section.get(LOG_PROB) or section.get(f"{LOG_PROB}_per_gpu")):
            yield Refusal(key, f"{key} is not given, verl needs it where use_dynamic_bsz is off")


def _near_misses(config):
    """`ValueError` for a key, in a section where verl takes any, that looks like one that is read
    here and is not."""
    wanted = {f"{ROOT}.actor.megatron.override_transformer_config": [PER_TOKEN]}
    wanted[ROOT] = ["actor", "model", "rollout"]
    for f in fields(Settings):
        parent, _, last = f.metadata.get("key", "").rpartition(".")
        if parent in ("trainer", "data", "algorithm.rollout_correction"):
            wanted.setdefault(parent, []).append(last)
    for section, names in wanted.items():
        node = OmegaConf.select(config, section)
        for key in node if isinstance(node, DictConfig) else ():
            near = _near(str(key), names)
            if near and key not in names and near not in node:
                raise ValueError(f"{section} has the key {short(key)}, did you mean {near!r}")
            if near == PER_TOKEN != key:
                raise ValueError(f"{section} has the key {short(key)}, did you mean {near!r}")


def _near(name, known):
    """The name of `known` that `name` is a misspelling of, None if it may be a name of its own."""
    near = difflib.get_close_matches(name, sorted(map(str, known)), n=1, cutoff=SURE)
    return near[0] if near and abs(len(near[0]) - len(name)) <= 2 else None


def _values(config, launch):
    """Field name -> value, each resolved and of its kind."""
    values = {}
    for f in fields(Settings):
        if not f.metadata:
            continue
        key, kind = f.metadata["key"], f.metadata["kind"]
        if key in launch.unknown:
            continue
        value = _plain(_select(config, key, f.default))
        if not kind.accepts(value):
            raise ValueError(f"{key} is {short(value)}, allowed is {kind.allowed}")
        values[f.name] = value
    return values


def _select(config, key, default):
    """The value at `key`, `default` if it is missing. `ValueError` if it lies in no mapping."""
    parts = key.split(".")
    node = config
    for i, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            raise ValueError(
                f"{'.'.join(parts[:i])} is {short(_plain(node))}, allowed is a mapping"
            )
        if part not in node:
            return default
        node = node[part]
    return node


def _plain(value):
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _leaves(value, prefix=""):
    """Dotted names of the values in nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix
