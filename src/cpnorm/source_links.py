"""Permanent links to lines of verl and Megatron-Core, at the tag of the installed release.

Lines are looked up in the installed source, so that a link moves with the release.
"""

from importlib.metadata import version

from cpnorm.sources import file, parsed

REPOSITORIES = {
    "verl": ("verl", "https://github.com/verl-project/verl/blob/v{}"),
    "megatron": ("megatron-core", "https://github.com/NVIDIA/Megatron-LM/blob/core_v{}"),
}
"""Import package: (distribution, repository at the tag of a release)."""


def link(module: str, name: str, quoted: str) -> str:
    """Address of the first line of `name` in `module` that contains `quoted`.

    `module` is dotted, `name` a function or `Class.method` in it. `ValueError` where the installed
    release has no such line.
    """
    distribution, address = REPOSITORIES[module.partition(".")[0]]
    path = "/".join(module.split(".")) + ".py"
    return f"{address.format(version(distribution))}/{path}#L{line(module, name, quoted)}"


def line(module: str, name: str, quoted: str) -> int:
    """Number of that line, from 1."""
    node = parsed(module)
    for part in name.split("."):
        found = [x for x in node.body if getattr(x, "name", None) == part]
        if not found:
            raise ValueError(f"{module} has no {name}")
        node = found[0]
    lines = file(module).read_text().splitlines()[node.lineno - 1 : node.end_lineno]
    for number, text in enumerate(lines, node.lineno):
        if quoted in text:
            return number
    raise ValueError(f"{name} in {module} has no line with {quoted!r}")
