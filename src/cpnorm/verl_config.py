"""A user's verl configuration: read as verl's trainer reads it, checked, never instantiated.

verl's own defaults, composed by Hydra from the installed package; the file merged over them; then
overrides as on verl's command line. Tags and anchors are refused, so a file can name no Python
object, and what a `_target_` names is not imported.
"""

import dataclasses
import difflib
import functools
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpnorm import installed
from cpnorm.settings import PER_TOKEN, ROOT, Settings, check
from cpnorm.sources import folder
from cpnorm.user_file import one_line, read_yaml, short

SECTIONS = {
    ROOT: (),
    f"{ROOT}.actor": ("verl.workers.config.actor", "ActorConfig", "McoreActorConfig"),
    f"{ROOT}.actor.policy_loss": ("verl.workers.config.actor", "PolicyLossConfig"),
    f"{ROOT}.actor.megatron": ("verl.workers.config.engine", "EngineConfig", "McoreEngineConfig"),
    f"{ROOT}.model": ("verl.workers.config.model", "HFModelConfig"),
    f"{ROOT}.rollout": ("verl.workers.config.rollout", "RolloutConfig"),
    "algorithm": (),
    "algorithm.rollout_correction": (),
    "data": (),
    "trainer": (),
}
"""Sections whose keys are checked; known are those of verl's YAML and of these dataclasses."""

_MISSING = object()


def load(path: str, overrides: Sequence[str] = ()) -> Settings:
    """The settings of the configuration in file `path`, changed by `overrides`.

    The file is a whole configuration or its `actor_rollout_ref` part. `ValueError`, one sentence
    without its full stop, for anything that verl or this module cannot use.
    """
    mine, choices = _split(read_yaml(path))
    parsed = _parse(overrides)
    groups = [o for o in parsed if o.package is not None or o.key_or_group in _groups()]
    choices |= {o.get_key_element().lstrip("+~"): o.input_line for o in groups}
    engine = _model_engine(mine)
    if engine and "model_engine" not in choices:
        choices["model_engine"] = f"model_engine={engine}"
    values = [o for o in parsed if o not in groups]
    try:
        defaults = _composed(tuple(choices.values()))
        config = OmegaConf.merge(defaults, mine)
        OmegaConf.set_struct(config, True)
        _check_overrides(values, config)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        given = frozenset(_leaves(mine)) | {
            key for o in values for key in _leaves(o.value(), o.key_or_group)
        }
        settings = Settings(**_values(config), given=given)
        if settings.strategy == "megatron":
            _check_keys(config, defaults)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"the configuration does not compose: {one_line(error)}") from error
    check(settings)
    return settings


def _split(data):
    """The user's values as a whole configuration, and what a `defaults:` list chooses."""
    data = {key: value for key, value in data.items() if key != "hydra"}
    choices = _choices(data.pop("defaults", []))
    if ROOT not in data and "actor" in data:
        data = {ROOT: data}
    part = data.get(ROOT, {"actor": {}} if choices else None)
    if not isinstance(part, dict):
        raise ValueError(f"the file has no mapping {ROOT!r} and no mapping 'actor'")
    if not isinstance(part.get("actor", {} if choices else None), dict):
        raise ValueError(f"{ROOT} has no mapping 'actor'")
    return data, choices


def _choices(entries):
    """Hydra's overrides for the entries of a `defaults:` list, by group."""
    advice = "write the composed configuration to a file with --cfg job and give that"
    if not isinstance(entries, list):
        raise ValueError(f"defaults is {short(entries)}, allowed is a list")
    choices = {}
    for i, entry in enumerate(entries):
        if (entry == "_self_" and i == len(entries) - 1) or entry == "ppo_trainer":
            continue
        if entry == "ppo_megatron_trainer":
            choices["model_engine"] = "model_engine=megatron"
            continue
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ValueError(f"defaults has {short(entry)}, which is not verl's own: {advice}")
        ((group, choice),) = entry.items()
        group = str(group).removeprefix("override ")
        name, _, package = group.partition("@")
        file = folder("verl") / "trainer/config" / name / f"{choice}.yaml"
        if name not in _groups() or "/" in str(choice) or not file.is_file():
            raise ValueError(f"defaults has {short(entry)}, which is not verl's own: {advice}")
        choices[group] = f"{name}{'@' + package if package else ''}={choice}"
    return choices


def _parse(overrides):
    """Hydra's parsed overrides. `ValueError` for one that is none, or that is not for verl."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError) as error:
            raise ValueError(f"{short(text)} is not an override such as key=value") from error
        if override.is_sweep_override() or override.key_or_group.split("/")[0].startswith("hydra"):
            raise ValueError(f"{short(text)} is an override of Hydra, allowed are those of verl")
        parsed.append(override)
    return parsed


@functools.cache
def _groups():
    """Config groups of verl's trainer."""
    config = folder("verl") / "trainer/config"
    return frozenset(p.name for p in config.iterdir() if any(p.glob("*.yaml")))


def _model_engine(mine):
    """The `model_engine` that a file speaks of: its key, or what it says about the actor."""
    if mine.get("model_engine") is not None:
        engine = mine["model_engine"]
        if engine not in _engines():
            raise ValueError(f"model_engine is {short(engine)}, allowed is {', '.join(_engines())}")
        return engine
    actor = mine.get(ROOT, {}).get("actor") or {}
    return "megatron" if "megatron" in (actor.get("strategy"), *actor) else None


def _engines():
    return sorted(p.stem for p in (folder("verl") / "trainer/config/model_engine").iterdir())


@functools.cache
def _composed(choices):
    """verl's trainer configuration with these choices of config groups."""
    config = str(folder("verl") / "trainer/config")
    with initialize_config_dir(config, version_base=None):
        composed = compose("ppo_trainer", overrides=list(choices))
    OmegaConf.set_struct(composed, False)
    return composed


def _values(config):
    """Field name -> value, each resolved and of its kind."""
    values = {}
    for f in dataclasses.fields(Settings):
        if not f.metadata:
            continue
        key, kind = f.metadata["key"], f.metadata["kind"]
        value = _select(config, key, f.default)
        if not kind.accepts(value):
            raise ValueError(f"{key} is {short(_plain(value))}, allowed is {kind.allowed}")
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


def _check_keys(config, defaults):
    """`ValueError` for a key that verl does not know in a section of `SECTIONS`, or for one that
    looks like the key that turns the per-token regime on and is not."""
    for section, source in SECTIONS.items():
        known = set(OmegaConf.select(defaults, section) or ())
        known |= installed.fields(*source) if source else set()
        node = OmegaConf.select(config, section)
        if not isinstance(node, DictConfig):
            raise ValueError(f"{section} is {short(_plain(node))}, allowed is a mapping")
        for key in node:
            if key not in known:
                near = _near(key, sorted(known))
                hint = f", {near}" if near else ""
                raise ValueError(f"{section} has the key {short(key)}, which verl lacks{hint}")
    section = f"{ROOT}.actor.megatron.override_transformer_config"
    for key in OmegaConf.select(config, section) or ():
        if key != PER_TOKEN and difflib.get_close_matches(str(key), [PER_TOKEN], cutoff=0.85):
            raise ValueError(f"{section} has the key {short(key)}, did you mean {PER_TOKEN!r}")


def _check_overrides(overrides, config):
    """`ValueError` where Hydra would refuse to change a key that is not there, or to add one that
    is."""
    for override in overrides:
        key = override.key_or_group
        there = OmegaConf.select(config, key, default=_MISSING) is not _MISSING
        if override.is_add() and there:
            raise ValueError(f"the configuration has the key {key} already, write it without +")
        if there or override.is_add() or override.is_force_add():
            continue
        parent, _, last = key.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        beside = [str(k) for k in node] if isinstance(node, DictConfig) else []
        hint = _near(last, beside) or f"write +{key}=... to add it"
        raise ValueError(f"the configuration has no key {key}, {hint}")


def _near(key, known):
    """A hint to the key of `known` that `key` is most like, None if it is like none."""
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"did you mean {near[0]!r}" if near else None


def _leaves(value, prefix=""):
    """Dotted names of the values in nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix
