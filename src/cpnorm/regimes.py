"""What stands between verl's loss and the gradient that the optimizer sees, taken from a run.

`trace` follows the gradient of one token through every function that rescales it. `aux_part` is
what the auxiliary loss of a mixture of experts adds to a step's gradient.
"""

from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from unittest import mock

import torch

from cpnorm import engine
from cpnorm.case import Case
from cpnorm.engine import Step
from cpnorm.engine.result import EXACT
from cpnorm.examined import AUX_RULES, FACTS
from cpnorm.ranks import World
from cpnorm.transformer import Model, token_ids

EMBEDDING = "embedding.word_embeddings.weight"

STAGES = (
    "ppo_loss",
    "postprocess_micro_batch_func",
    "forward_step_calc_loss",
    "start_grad_sync",
    "finalize_model_grads",
)
"""Functions that a gradient passes: the first two are verl 0.9.1's, the others Megatron-Core's."""

FACTORS = {
    "averaging": lambda D, C, M, T, K: (M, C / M, 1 / (D * C), 1),
    "per-token": lambda D, C, M, T, K: (T / D, 1, 1, 1 / K),
    "two values": lambda D, C, M, T, K: (M, C / M, 1, 1),
}
"""What each of `STAGES` after the first multiplies by, for symbols or for fractions.

The sum over ranks and micro-batches is not among them. "two values" is a loss function that
returns two values in the per-token regime.
"""

AUX_FACTOR = {
    release: AUX_RULES[facts.aux] for release, facts in FACTS["megatron-core"].items() if facts.aux
}
"""What a release of Megatron-Core makes of the auxiliary loss in the per-token regime, against the
unsharded run, where no sequence needs padding and K = T. For symbols or numbers C and TP."""


def lone_token(case: Case, model: Model) -> tuple[int, int]:
    """A sequence, and a token id that occurs once: at that sequence's last row with a loss.

    The embedding of that id reaches one log-probability with a loss, that of the sequence's last
    token: attention is causal, the row after it has no loss. So its gradient is one token's.
    `ValueError` if the mini-batch has no such sequence.
    """
    ids = token_ids(case, model)
    everywhere = torch.cat(ids).tolist()
    for s, (sequence, tokens) in enumerate(zip(case.sequences, ids, strict=True)):
        if sequence.counted[-1] and everywhere.count(int(tokens[-2])) == 1:
            return s, int(tokens[-2])
    raise ValueError(f"seed is {case.seed}: no last row with a loss has a token id of its own")


def trace(
    world: World, case: Case, variant: str = "verl", model: Model = engine.TINY
) -> torch.Tensor:
    """The gradient by the embedding of `lone_token` after each of `STAGES`, `(5, hidden)`.

    One exact step on the ranks of `world`, one backward pass. `main_grad` is read after it, after
    the sum over ranks and at the end. Before it stand two losses, verl's own and the one that it
    returns: what autograd handed back to each is what the functions after it multiplied by.

    `ValueError` if two ranks hold a part of the gradient before the sum, if micro-batches or ranks
    are scaled unlike, or for pipeline or tensor parallelism, which cut the way or the embedding.
    """
    if case.pp * case.tp > 1:
        raise ValueError(f"pp is {case.pp} and tp is {case.tp}, allowed in a trace is 1")
    engine.check_fit(case, model)
    _, token = lone_token(case, model)
    scales, gradients = zip(*world.run(_trace_on_rank, case, model, variant, token), strict=True)
    if len(set().union(*scales)) != 1:
        raise ValueError(f"micro-batches are scaled unlike: {scales}")
    gradients = torch.stack(gradients)
    if (gradients[:, 0] != 0).any(-1).sum() != 1 or (gradients[:, 1:] != gradients[0, 1:]).any():
        raise ValueError("one rank must hold the gradient before the sum, and all of them after it")
    own, after = gradients[:, 0].sum(0), gradients[0, 1:]
    before = [own / scale for scale in scales[0][0]]
    return torch.stack([*before, own, *after])


def ratios(values: torch.Tensor) -> list[float]:
    """Least-squares factor from each row of `values` to the next."""
    return [float(b @ a / (a @ a)) for a, b in pairwise(values)]


def _trace_on_rank(case, model, variant, token):
    """Imports verl and Megatron-Core in the ranks only."""
    from cpnorm import rank_imports  # noqa: F401
    from cpnorm.engine.step import run_rank
    from cpnorm.engine.variants import VARIANTS

    handed, gradients = [], []

    class Traced(VARIANTS[variant]):
        """Notes what autograd hands to each loss, and `main_grad` at three moments."""

        def postprocess_micro_batch_func(self, *args, loss_function, **kwargs):
            scale = [0.0, 0.0]
            handed.append(scale)

            def noted(**inputs):
                loss, metrics = loss_function(**inputs)
                loss.register_hook(lambda g: scale.__setitem__(0, float(g)))
                return loss, metrics

            returned = super().postprocess_micro_batch_func(*args, loss_function=noted, **kwargs)
            returned[0].register_hook(lambda g: scale.__setitem__(1, float(g)))
            return returned

        def read(self):
            weight = self.module[0].module.get_parameter(EMBEDDING)
            gradients.append(weight.main_grad[token].clone())

        def finalize(self, model, *args, **options):
            self.read()
            sync = model[0].finish_grad_sync

            def noted(**options):
                sync(**options)
                self.read()

            with mock.patch.object(model[0], "finish_grad_sync", noted):
                super().finalize(model, *args, **options)
            self.read()

    run_rank(case, model, exact=True, engine_class=Traced)
    return [tuple(scale) for scale in handed], torch.stack(gradients)


def aux_factor(case: Case) -> float:
    """`AUX_FACTOR` of the installed release; `KeyError` for one that has not been measured."""
    return AUX_FACTOR[version("megatron-core")](case.C, case.tp)


def aux_part(world: World, case: Case, variant: str = "verl") -> tuple[Step, float]:
    """What the auxiliary loss adds to an exact step's gradient, and how exact that is.

    The step with the loss, coefficient 1, less the step without it. Each may be off by `EXACT` of
    its largest gradient; the second result is the sum of the two, of the part's largest gradient.
    """
    on, off = (
        engine.run(world, case, Model(experts=4, aux=aux), True, variant) for aux in (1.0, 0.0)
    )
    part = {name: on.gradients[name] - off.gradients[name] for name in on.gradients}
    bound = EXACT * (_largest(on.gradients) + _largest(off.gradients)) / _largest(part)
    return replace(on, gradients=part), bound


def _largest(gradients):
    return max(float(g.abs().max()) for g in gradients.values())
