"""What a user hands to the command, as one run of a trainer of verl's: nothing of it is executed.

A YAML file, a saved command line, a shell script, a command line as words, or overrides alone.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from cpnorm import shell
from cpnorm.bearing import is_without
from cpnorm.settings import MAY_BE_UNKNOWN, ROOT, Settings
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
LIKE_YAML = re.compile(rf"^({ROOT}|actor|defaults):", re.MULTILINE)
PYTHON = re.compile(r"(.*/)?python[\d.]*")
FLAGS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path"}
FLAGS |= {"--config-dir": "more", "-cd": "more"}


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

    @property
    def is_whole(self) -> bool:
        """Whether it has all that a run has, and is no part of a configuration in YAML."""
        return self.values is None or "defaults" in self.values


def read(first: str, words: Sequence[str] = (), line: int | None = None) -> Launch:
    """The launch that the arguments of the command speak of.

    `first` is a file, `-` for standard input, the first word of a command line, or an override.
    `words` are the rest of the command line, or further overrides, or `NAME=value` for a variable
    that the script in the file reads. `line` chooses one of a script's launches. `ValueError`, one
    sentence without its full stop, for anything else.
    """
    if first != "-" and not _exists(first):
        command = [first, *words]
        if "-m" in command or any(map(PYTHON.fullmatch, command)):
            return _script(shlex.join(command), None, (), line)
        if OVERRIDE.match(first) or first.startswith("-"):
            return _command([Word(word, ()) for word in ("-m", MAIN, *command)])
    text = read_text(first)
    if Path(first).suffix in (".yaml", ".yml"):
        return _file(text, first, words)
    try:
        found = parse_yaml(text, first)
    except ValueError:
        if LIKE_YAML.search(text) and "python" not in text:
            raise
        return _script(text, first, words, line)
    if isinstance(found, list) or found.keys() & {ROOT, "actor", "defaults"}:
        return _file(text, first, words)
    return _script(text, first, words, line)


def _exists(path):
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _file(text, path, words):
    """The launch with a YAML file's values, by the trainer whose sections it has, or with the
    overrides in it, as Hydra writes them to `overrides.yaml`."""
    values = parse_yaml(text, path)
    if isinstance(values, list):
        return Launch(overrides=(*values, *words))
    module = MAIN
    if "async_training" in values:
        module = FULLY_ASYNC
    elif isinstance(values.get("rollout"), dict):
        module = ONE_STEP_OFF
    own = path != "-" and "defaults" in values
    place = Path(path).resolve().parent if own else None
    return Launch(module, tuple(words), values, folder=place)


def _script(text, path, words, line):
    """The one launch of a trainer in a script; `words` are its variables and more overrides."""
    name = {"-": "standard input", None: "the command"}.get(path) or Path(path).name
    given, more = {}, []
    variables = shell.read(text).variables
    for word in words:
        found = ASSIGNMENT.fullmatch(word)
        if found and found[1] in variables:
            given[found[1]] = found[2]
        elif found and (found[1].isupper() or found[1].isdigit()):
            names = ", ".join(sorted(variables)) or "none"
            raise ValueError(f"{name} reads no variable {found[1]}, allowed are its own: {names}")
        else:
            more.append(Word(word, ()))
    script = shell.read(text, given)
    for variable, at in script.overwritten.items():
        raise ValueError(
            f"line {at} of {name} sets {variable}, so {variable}={given[variable]} has no effect: "
            "change that line"
        )
    launch = _chosen(script, name, line)
    return replace(_command([*launch.words, *more]), source=f"line {launch.line} of {name}")


def _chosen(script, name, line):
    """The launch of a script that is meant. `ValueError` if none is, or more than one."""
    known = [one for one in script.launches if not one.words[0].unknown]
    if script.launches and not known:
        _known(script.launches[0].words[0])
    found = list({launch.words: launch for launch in reversed(known)}.values())
    found = [one for one in found if _module(one.words)[0] in TRAINERS] or found
    if not found and script.ended:
        raise ValueError(
            f"{name} ends at line {script.ended}, before it comes to a launch: give what it reads, "
            "such as 1=VALUE for its first argument"
        )
    if not found:
        raise ValueError(
            f"{name} has no command such as python3 -m {MAIN}, and is no YAML file with the "
            f"mapping {ROOT!r} or 'actor'"
        )
    lines = sorted({launch.line for launch in found})
    if line is not None:
        found = [launch for launch in found if launch.line == line]
        if not found:
            raise ValueError(
                f"line is {line}, allowed is one of a launch: {', '.join(map(str, lines))}"
            )
    unknown = dict.fromkeys(name for launch in found for name in launch.unknown)
    if unknown:
        where = " or ".join(map(str, sorted({one.line for one in found if one.unknown})))
        raise ValueError(f"whether line {where} of {name} runs depends on {_give(tuple(unknown))}")
    if len({launch.line for launch in found}) > 1:
        raise ValueError(
            f"{name} has launches at lines {' and '.join(map(str, lines))}, allowed is one: "
            f"choose it with --line {lines[0]}"
        )
    bear = {frozenset(w for w in one.words if not _is_without(w)) for one in found}
    if len(bear) > 1:
        different = frozenset.union(*bear) - frozenset.intersection(*bear)
        texts = ", ".join(sorted(short(word.text) for word in different)[:4])
        raise ValueError(
            f"line {found[0].line} of {name} runs {len(found)} times with other words, allowed is "
            f"one run: {texts}"
        )
    return found[-1]


def _is_without(word):
    """Whether a word is an override that has no bearing on normalisation."""
    return bool(OVERRIDE.match(word.text)) and is_without(word.text.lstrip("+~").partition("=")[0])


def _module(words):
    """The trainer's module, in dots, and the words after it. `ValueError` if there is none."""
    texts = [word.text for word in words]
    at = [i for i, text in enumerate(texts[:-1]) if text == "-m"]
    at = [i for i in at if texts[i + 1] in TRAINERS] or at
    if at:
        return texts[at[0] + 1], words[at[0] + 2 :]
    for i, text in enumerate(texts):
        if text.endswith(".py"):
            name = text.removesuffix(".py").lstrip("./").replace("/", ".")
            return next((m for m in TRAINERS if f".{name}".endswith(f".{m}")), name), words[i + 1 :]
    raise ValueError(f"the command runs no module, allowed is such as python3 -m {MAIN}")


def _command(words):
    """The launch of a command line from `python` or `-m` on."""
    module, rest = _module(words)
    for word in words:
        if word.text == module:
            _known(word)
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
                "--config-path, --config-dir and key=value"
            )
        elif not word.unknown:
            overrides.append(word.text)
        else:
            overrides.append(_placeholder(word))
            unknown.add(flag.lstrip("+~"))
    launch = Launch(module, tuple(overrides), unknown=frozenset(unknown))
    return _configured(launch, **hydra)


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
    text = re.sub(r"[^\w./ -]", "_", value)  # of a shell's text Hydra would read as its own
    return f"{key}='{text}'"


def _give(names):
    """Names of what is unknown, and how to give it."""
    variables = [name for name in names if ASSIGNMENT.fullmatch(f"{name}=")]
    advice = "write its value into the script"
    if variables:
        advice = f"give {' '.join(f'{name}=VALUE' for name in variables)}"
    return f"{', '.join(names)}, which nothing here says: {advice}"


def _configured(launch, name=None, path=None, more=None):
    """`launch` with the config that Hydra's options name. `ValueError` if it is not there."""
    name = name and name.removesuffix(".yaml")
    own = folder("verl") / TRAINERS[launch.module].config_path
    place = (own.parent / path) if path is not None else own
    if more is not None:
        if not Path(more).is_dir():
            raise ValueError(f"--config-dir is {short(more)}, allowed is a folder that is there")
        launch = replace(launch, folder=Path(more).resolve())
        if (launch.folder / f"{name}.yaml").is_file():
            place = launch.folder
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
