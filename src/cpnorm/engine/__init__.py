"""verl's Megatron engine on Megatron-Core, in processes on a CPU."""

from importlib.metadata import version
from importlib.util import find_spec

from cpnorm import installed
from cpnorm.case import Case, check_runs
from cpnorm.engine.result import Agreement, RankResult, Step, compare, joined
from cpnorm.ranks import World
from cpnorm.transformer import Model

__all__ = [
    "Agreement",
    "RankResult",
    "Step",
    "check_fit",
    "compare",
    "joined",
    "run",
    "transformer_engine_runs",
]

TINY = Model()


def run(
    world: World, case: Case, model: Model = TINY, exact: bool = False, variant: str = "verl"
) -> Step:
    """One step of `case` on the ranks of `world`, whose size is dp * cp * tp * pp.

    `exact` keeps float64 where Megatron-Core would compute in float32. `variant` is one of
    `variants.VARIANTS`, which all but "verl" change the per-token regime only. `ValueError` for a
    topology or a variant that does not fit, or for pipeline stages that would share a GPU, before
    anything runs; `RankError` if a rank fails.
    """
    check_fit(case, model)
    if variant != "verl" and case.regime != "per-token":
        raise ValueError(f"variant is {variant!r}, allowed in the {case.regime} regime is 'verl'")
    if case.pp > 1 and (world.device, world.backend) == ("cuda", "gloo"):
        raise ValueError(
            f"pp is {case.pp}, allowed is 1 where ranks share a GPU: gloo, which they use, sends "
            "nothing from a GPU's memory; take as many GPUs as ranks, or the CPU"
        )
    return joined(world.run(_on_rank, case, model, exact, variant, world.device))


def check_fit(case: Case, model: Model) -> None:
    """`ValueError` naming field, value and what is allowed if `model` cannot be cut so, or if the
    installed verl does not know the loss or the mode."""
    check_runs(case)
    stages = case.pp * (case.vpp or 1)
    for field, value, what, size in (
        ("tp", case.tp, "attention heads", model.heads),
        ("tp", case.tp, "query groups", model.groups),
        ("tp", case.tp, "vocabulary entries", model.vocab),
        ("tp", case.tp, "rows of an MLP", model.ffn),
        ("pp * vpp", stages, "layers", model.layers),
    ):
        if size % value:
            raise ValueError(f"{field} is {value}, allowed is a divisor of the {size} {what}")
    if case.vpp and case.max_token_len is None and case.M % case.pp:
        raise ValueError(f"vpp needs micro-batches in groups of pp = {case.pp}, but M is {case.M}")
    if case.layout != "zigzag" and case.cp > 1:
        fields = installed.fields("megatron.core.packed_seq_params", "PackedSeqParams")
        if "cp_partition_mode" in fields:
            why = (
                "verl asks for another with an attention variant that the tiny model does not have"
            )
        else:
            release = version("megatron-core")
            why = f"Megatron-Core {release} has no PackedSeqParams.cp_partition_mode"
        raise ValueError(f"layout is {case.layout!r}, allowed is zigzag: {why}")


def transformer_engine_runs(case: Case, device: str) -> bool:
    """Whether attention is Transformer Engine's: on "cuda" in bfloat16, where it is installed."""
    return (
        device == "cuda"
        and case.dtype == "bfloat16"
        and find_spec("transformer_engine") is not None
    )


def _on_rank(case, model, exact, variant, device):
    """Imports verl and Megatron-Core in the ranks only."""
    from cpnorm import rank_imports  # noqa: F401
    from cpnorm.engine.step import run_rank
    from cpnorm.engine.variants import VARIANTS

    return run_rank(case, model, exact, VARIANTS[variant], device)
