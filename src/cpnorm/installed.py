"""What the installed verl and Megatron-Core do with a step, read from their sources.

Nothing of theirs is imported: the files are parsed.
"""

import ast
import functools
from importlib import metadata
from typing import NamedTuple

from cpnorm.sources import parsed

EXAMINED = ("0.8.0", "0.9.0", "0.9.1")
"""Releases of verl whose sources were read for `Engine` and `aggregated`."""


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
    return {name: _version(name) for name in ("verl", "megatron-core", "megatron-bridge")}


@functools.cache
def engine() -> Engine:
    """As read from `verl/workers/engine/megatron/transformer_impl.py`."""
    (function,) = (
        node
        for owner in parsed("verl.workers.engine.megatron.transformer_impl").body
        if isinstance(owner, ast.ClassDef) and owner.name == "MegatronEngineWithLMHead"
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == "postprocess_micro_batch_func"
    )
    nodes = list(ast.walk(function))
    return Engine(
        counts=any(
            isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple) and len(n.value.elts) == 3
            for n in nodes
        ),
        guard=any(
            isinstance(n, ast.Compare) and "seq-mean-token-mean" in _strings(n) for n in nodes
        ),
        refuses_bshd=any(
            isinstance(n, ast.Raise) and any("use_remove_padding" in s for s in _strings(n))
            for n in nodes
        ),
    )


@functools.cache
def aggregated(loss: str, mode: str) -> str | None:
    """The mode in which a registered policy loss really aggregates when `mode` is configured.

    None for a loss that aggregates in a way of its own. As read from the calls that its function in
    `verl/trainer/ppo/core_algos.py` makes with `loss_agg_mode`: a constant there wins.
    """
    (function,) = (
        node
        for node in parsed("verl.trainer.ppo.core_algos").body
        if isinstance(node, ast.FunctionDef)
        for d in node.decorator_list
        if isinstance(d, ast.Call) and d.args and _strings(d.args[0]) == [loss]
    )
    values = [
        keyword.value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "loss_agg_mode"
    ]
    if not values:
        return None
    return next((v.value for v in values if isinstance(v, ast.Constant)), mode)


@functools.cache
def has_dynamic_groups() -> bool:
    """Whether Megatron-Core's `initialize_model_parallel` takes `dynamic_context_parallel`."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == "initialize_model_parallel"
        and "dynamic_context_parallel" in [a.arg for a in node.args.args + node.args.kwonlyargs]
        for node in parsed("megatron.core.parallel_state").body
    )


@functools.cache
def fields(module: str, *owners: str) -> frozenset[str]:
    """Fields that the dataclasses `owners` in a module declare themselves."""
    return frozenset(
        node.target.id
        for owner in parsed(module).body
        if isinstance(owner, ast.ClassDef) and owner.name in owners
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _strings(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str]
