"""What a user hands to the command, as one run of a trainer of verl's: nothing of it is executed.

A YAML file, a saved command line, a shell script, a command line as words, or overrides alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from cpnorm import shell
from cpnorm.settings import MAY_BE_UNKNOWN, Settings
from cpnorm.shell import Word
from cpnorm.sources import folder
from cpnorm.user_file import parse_yaml, read_text, short


class Trainer(NamedTuple):
    """Where a trainer's module has its configuration: a folder of verl, and a name in it."""

    config_path: str
    config_name: str


MAIN = "verl.trainer.main_ppo"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
TRAINERS = {
    MAIN: Trainer("trainer/config", "ppo_trainer"),
    FULLY_ASYNC: Trainer("experimental/fully_async_policy/config", "fully_async_ppo_trainer"),
    ONE_STEP_OFF: Trainer("experimental/one_step_off_policy/config", "one_step_off_ppo_trainer"),
}
"""Modules of verl that train an actor with its policy loss, as their `hydra.main` declares them."""

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*|[1-9])=(.*)", re.DOTALL)
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@:-]*=|~[A-Za-z_]")
PYTHON = re.compile(r"(.*/)?python[\d.]*")
FLAGS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path"}
FLAGS |= {"--config-dir": "path", "-cd": "path"}


@dataclass(frozen=True)
class Launch:
    """One run: the trainer's module, overrides as Hydra takes them, and either the values of a YAML
    file or the name of a config of the trainer's, None for the one that its module declares.

    `folder` is that of the user's own YAML files, `unknown` has the keys whose values only a run of
    the script would tell, `source` says where the launch was read.
    """

    module: str = MAIN
    overrides: tuple[str, ...] = ()
    values: dict | None = None
    config_name: str | None = None
    folder: Path | None = None
    unknown: frozenset[str] = frozenset()
    source: str | None = None


def read(first: str, words: Sequence[str] = ()) -> Launch:
    """The launch that the arguments of the command speak of.

    `first` is a file, `-` for standard input, the first word of a command line, or an override.
    `words` are the rest of the command line, or further overrides, or `NAME=value` for a variable
    that the script in the file reads. `ValueError`, one sentence without its full stop, for
    anything else.
    """
    if first != "-" and not _exists(first):
        if PYTHON.fullmatch(first) and words:
            return _command([Word(word, ()) for word in (first, *words)])
        if OVERRIDE.match(first):
            return Launch(overrides=(first, *words))
    text = read_text(first)
    if Path(first).suffix in (".yaml", ".yml"):
        return _file(parse_yaml(text, first), first, words)
    try:
        values = parse_yaml(text, first)
    except ValueError as error:
        return _script(text, first, words, str(error))
    if text.startswith("#!"):
        return _script(text, first, words, f"{short(first)} is a script")
    return _file(values, first, words)


def _exists(path):
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _file(values, path, words):
    """The launch with a YAML file's values, by the trainer whose sections it has."""
    module = MAIN
    if "async_training" in values:
        module = FULLY_ASYNC
    elif isinstance(values.get("rollout"), dict):
        module = ONE_STEP_OFF
    own = path != "-" and "defaults" in values
    place = Path(path).resolve().parent if own else None
    return Launch(module, tuple(words), values, folder=place)


def _script(text, path, words, what):
    """The one launch of a trainer in a script; `words` are its variables and more overrides."""
    variables = shell.read(text).variables
    pairs = [(ASSIGNMENT.fullmatch(word), word) for word in words]
    given = {found[1]: found[2] for found, _ in pairs if found and found[1] in variables}
    more = [Word(word, ()) for found, word in pairs if not (found and found[1] in variables)]
    launches = {launch.words: launch for launch in reversed(shell.read(text, given).launches)}
    if not launches:
        raise ValueError(f"{what}, and has no command such as python3 -m {MAIN}")
    found = list(launches.values())
    found = [one for one in found if _module(one.words)[0] in TRAINERS] or found
    if len(found) > 1:
        lines = " and ".join(str(line) for line in sorted(launch.line for launch in found))
        raise ValueError(f"{short(path)} has launches at lines {lines}, allowed is one")
    (launch,) = found
    if launch.unknown:
        raise ValueError(
            f"whether line {launch.line} of {short(path)} runs depends on {_give(launch.unknown)}"
        )
    source = f"line {launch.line} of {'standard input' if path == '-' else Path(path).name}"
    return replace(_command([*launch.words, *more]), source=source)


def _module(words):
    """The trainer's module, in dots, and the words after it. `ValueError` if there is none."""
    for i, word in enumerate(words[:-1]):
        if word.text == "-m":
            return words[i + 1].text, words[i + 2 :]
    for i, word in enumerate(words):
        if word.text.endswith(".py"):
            name = word.text.removesuffix(".py").lstrip("./").replace("/", ".")
            return next((m for m in TRAINERS if f".{name}".endswith(f".{m}")), name), words[i + 1 :]
    raise ValueError(f"the command runs no module, allowed is such as python3 -m {MAIN}")


def _command(words):
    """The launch of a command line from `python` on."""
    module, rest = _module(words)
    if module not in TRAINERS:
        return Launch(module)
    hydra, overrides, unknown = {}, [], set()
    rest = iter(rest)
    for word in rest:
        flag, equals, value = word.text.partition("=")
        if flag in FLAGS:
            value = word._replace(text=value) if equals else next(rest, Word("", ()))
            hydra[FLAGS[flag]] = _known(value)
        elif flag.startswith("-"):
            raise ValueError(
                f"{short(word.text)} is an option that is not read, allowed are --config-name, "
                "--config-path and key=value"
            )
        elif not word.unknown:
            overrides.append(word.text)
        else:
            overrides.append(_placeholder(word))
            unknown.add(flag.lstrip("+~"))
    launch = Launch(module, tuple(overrides), unknown=frozenset(unknown))
    return _configured(launch, hydra.get("name"), hydra.get("path"))


def _known(word):
    if word.unknown:
        raise ValueError(f"the word {short(word.text)} depends on {_give(word.unknown)}")
    return word.text


def _placeholder(word):
    """An override whose value is its own unexpanded text. `ValueError` if a verdict needs it."""
    key, equals, value = word.text.partition("=")
    if not OVERRIDE.match(word.text) or not equals:
        _known(word)
    name = key.lstrip("+~")
    needed = {f.metadata["key"] for f in fields(Settings) if f.metadata} - MAY_BE_UNKNOWN
    if any(f"{one}.".startswith(f"{name}.") for one in needed) or "/" in key or "@" in key:
        raise ValueError(f"{name} depends on {_give(word.unknown)}")
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{quoted}'"


def _give(names):
    """Names of what is unknown, and how to give it."""
    variables = [name for name in names if ASSIGNMENT.fullmatch(f"{name}=")]
    advice = "write its value into the script"
    if variables:
        advice = f"give {' '.join(f'{name}=...' for name in variables)}"
    return f"{', '.join(names)}, which nothing here says: {advice}"


def _configured(launch, name, path):
    """`launch` with the config that Hydra's options name. `ValueError` if it is not there."""
    name = name and name.removesuffix(".yaml")
    own = folder("verl") / TRAINERS[launch.module].config_path
    place = (own.parent / path) if path is not None else own
    if place.resolve() == own.resolve():
        if name is not None and not (own / f"{name}.yaml").is_file():
            allowed = ", ".join(sorted(p.stem for p in own.glob("*trainer*.yaml")))
            raise ValueError(f"--config-name is {short(name)}, allowed is one of {allowed}")
        return replace(launch, config_name=name)
    file = place / f"{name or TRAINERS[launch.module].config_name}.yaml"
    if not file.is_file():
        raise ValueError(
            f"--config-path is {short(path)}, where {file.name} is not to be found, allowed is "
            "config, the trainer's own, or the absolute path of a folder"
        )
    return replace(launch, values=parse_yaml(read_text(str(file)), str(file)), folder=place)
