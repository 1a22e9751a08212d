"""Files that a user hands to the command: text, YAML of plain values, lengths of sequences."""

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpnorm.case import Sequence

SIZE = 2**20
"""Bytes that a file may have."""
DEPTH = 40
"""How deep its YAML may be nested."""


def read_text(path: str) -> str:
    """Text of a file given by a user, of standard input for `-`. `ValueError` if it is no UTF-8
    file of at most `SIZE`."""
    name = short(path) if path != "-" else "standard input"
    try:
        if path != "-" and not Path(path).is_file():
            raise ValueError(f"{name} is not a file")
        with open(path, "rb") if path != "-" else nullcontext(sys.stdin.buffer) as file:
            content = file.read(SIZE + 1)
        if len(content) > SIZE:
            raise ValueError(f"{name} is larger than {SIZE} bytes, which is allowed")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error


def parse_yaml(text: str, path: str) -> dict | list[str]:
    """The mapping in the text of the YAML file `path`, its interpolations as they stand, or the
    list of overrides that Hydra writes.

    `ValueError` for anything else, for tags and for aliases, which can name Python objects or grow
    without bound.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise ValueError(f"{short(path)} has the YAML tag {short(tag)}, allowed is none")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"{short(path)} has a YAML alias, write its values out")
            if isinstance(event, yaml.ScalarEvent) and depth == 0:
                raise ValueError(f"{short(path)} holds a text, allowed is a mapping")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise ValueError(f"{short(path)} is nested deeper than {DEPTH}, which is allowed")
        data = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{short(path)} is not YAML: {one_line(error)}") from error
    if data and isinstance(data, list) and all(type(one) is str and "=" in one for one in data):
        return data
    if not isinstance(data, dict):
        raise ValueError(f"{short(path)} holds {_name(data)}, allowed is a mapping")
    return data


def read_lengths(path: str) -> tuple[Sequence, ...]:
    """Sequences from a file with a prompt's and a response's length on each line.

    Blank lines and lines that start with # do not count. `ValueError` names a line that is no such.
    """
    sequences = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not all(w.isascii() and w.isdigit() and len(w) < 10 for w in words):
            raise ValueError(
                f"line {number} of {short(path)} is {short(line)}, allowed are two integers, the "
                "tokens of a prompt and of its response"
            )
        try:
            sequences.append(Sequence(*map(int, words)))
        except ValueError as error:
            raise ValueError(f"line {number} of {short(path)}: {error}") from error
    if not sequences:
        raise ValueError(f"{short(path)} has no lengths, allowed is at least one line of two")
    return tuple(sequences)


def short(value: Any) -> str:
    """`value` as a message can quote it: one line, not longer than it is useful."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: Exception) -> str:
    """What an error of Hydra, OmegaConf or YAML says, without its full stop."""
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:200].rstrip(".") or type(error).__name__


def _name(value):
    return "nothing" if value is None else f"a {type(value).__name__}"
