"""verl's own loss functions on one micro-batch of a `Case`.

Every name in verl is read or called as verl 0.9.1 has it; nothing is copied. A micro-batch's rows
are its sequences end to end, prompt and response, as in verl's packed batch without padding.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from tensordict import NonTensorData, TensorDict
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from .batch import Batch
from .case import Case, check_runs

OUT_OF_REACH = 1e6  # clip bounds of a case with clip=False; ratios of a batch stay below 10


def registered_losses() -> tuple[str, ...]:
    """Names in verl's registry `POLICY_LOSS_REGISTRY`, in its order."""
    return tuple(POLICY_LOSS_REGISTRY)


def actor_config(case: Case, **more) -> ActorConfig:
    """verl's configuration of the actor, with what `ppo_loss` puts into `global_batch_info`.

    `more` are further fields of `ActorConfig`, such as `entropy_coeff` and `use_kl_loss`.

    The two covariance losses get wide bands and a share of a quarter, because verl's defaults
    (0.0002) pick one token or none in a small batch. `bypass_mode` takes no rollout weights, it
    computes its own: with `rollout_weights` it is REINFORCE with sequence weights, without it is
    PPO-clip with rejected sequences. `ValueError` for a loss or a mode that verl does not know.
    """
    check_runs(case)
    reinforce = RolloutCorrectionConfig(loss_type="reinforce", rollout_is="sequence")
    own = {"dro_beta": 0.1} if case.loss == "dro" else {}  # a name that verl 0.8.0 does not know
    rejection = RolloutCorrectionConfig(
        loss_type="ppo_clip",
        rollout_is=None,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.9_1.1",
    )
    config = ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=case.micro_batch_size,
        ppo_mini_batch_size=case.B,
        clip_ratio_low=case.clip_low if case.clip else OUT_OF_REACH,
        clip_ratio_high=case.clip_high if case.clip else OUT_OF_REACH,
        clip_ratio_c=3.0 if case.clip else OUT_OF_REACH,
        loss_agg_mode=case.mode,
        loss_scale_factor=case.loss_scale_factor,
        policy_loss=PolicyLossConfig(
            loss_mode=case.loss,
            clip_cov_ratio=0.25,
            clip_cov_lb=0.001,
            kl_cov_ratio=0.25,
            rollout_correction=reinforce if case.rollout_weights else rejection,
            **own,
        ),
        **more,
    )
    config.global_batch_info.update(
        dp_size=case.D,
        batch_num_tokens=sum(case.n),
        global_batch_size=case.B,
        loss_scale_factor=case.loss_scale_factor,
    )
    return config


@dataclass(frozen=True)
class MicroBatch:
    """The part of a `Batch` that belongs to b consecutive sequences, w the longest response.

    `rows` is where its rows lie in the mini-batch; `index (b, w)` is 1 + the row (counted in the
    micro-batch) of a response token, 0 where there is none. The others are `(b, w)`.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    rows: slice
    index: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None
    mask: torch.Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, prompt and response."""
        return tuple(p + r for p, r in zip(self.prompts, self.responses, strict=True))


def micro_batch(case: Case, data: Batch, sequences: range) -> MicroBatch:
    """The micro-batch of `case` that holds `sequences`, consecutive indices."""
    first, last = sequences[0], sequences[-1] + 1
    seqs = case.sequences[first:last]
    start = sum(s.length for s in case.sequences[:first])
    prompts, responses = tuple(s.prompt for s in seqs), tuple(s.response for s in seqs)
    part = slice(first, last), slice(0, max(responses))
    return MicroBatch(
        prompts=prompts,
        responses=responses,
        rows=slice(start, start + sum(prompts) + sum(responses)),
        index=row_index(prompts, responses),
        old=data.old[part],
        ref=data.ref[part],
        advantages=data.advantages[part],
        weights=data.weights[part] if case.rollout_weights else None,
        mask=data.mask[part],
    )


@functools.lru_cache(maxsize=4096)
def row_index(prompts: tuple[int, ...], responses: tuple[int, ...]) -> torch.Tensor:
    """`MicroBatch.index`, found by sending the rows' numbers 1, 2, ... through verl.

    `no_padding_2_padding` (`verl/workers/utils/padding.py`, verl 0.9.1) takes row
    `prompt - 1 + j` for response token j: the next-token shift.
    """
    numbers = torch.arange(1, 1 + sum(prompts) + sum(responses))
    return no_padding_2_padding(numbers, TensorDict(_lengths(prompts, responses), [len(prompts)]))


def columns(rows: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Response columns `(..., b, w)` of values of all rows `(..., R)`, 0 past a response."""
    zero = rows.new_zeros(*rows.shape[:-1], 1)
    return torch.cat([zero, rows], dim=-1)[..., micro.index]


def policy_loss(
    config: ActorConfig,
    micro: MicroBatch,
    log_prob: torch.Tensor,
    mask: torch.Tensor,
    seed: int = 0,
) -> torch.Tensor:
    """verl's registered loss, a scalar, called as verl 0.9.1's `ppo_loss` calls it.

    `log_prob` and `mask` are `(k * b, w)`: k copies of the micro-batch one below the other, and
    the other arguments are repeated to fit. torch's generator starts from `seed` at every call,
    because `clip_cov` draws from it: real ranks agree only if their generators do.
    """
    copies = len(log_prob) // len(micro.old)

    def repeat(x):
        return x if copies == 1 or x is None else x.repeat(copies, 1)

    torch.default_generator.manual_seed(seed)
    loss, _ = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=repeat(micro.old),
        log_prob=log_prob,
        advantages=repeat(micro.advantages),
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=repeat(micro.weights),
    )
    return loss


def full_loss(config: ActorConfig, micro: MicroBatch, output: torch.Tensor) -> torch.Tensor:
    """verl's whole `ppo_loss`, a scalar, of the model's output for all rows.

    `output` holds log-probabilities, `(1, R)`, or these and entropies, `(2, R)`. `ppo_loss` selects
    the response rows, calls the registered loss, and adds what `config` asks for of the KL term
    (against the reference policy) and, given entropies, of the entropy term.
    """
    offsets = torch.tensor((0, *itertools.accumulate(micro.lengths)))
    nested = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in output)
    torch.default_generator.manual_seed(0)
    named = dict(zip(("log_probs", "entropy"), nested, strict=False))
    return ppo_loss(config, named, tensor_dict(config, micro))[0]


def tensor_dict(config: ActorConfig, micro: MicroBatch) -> TensorDict:
    """The micro-batch as verl's engine hands it to `ppo_loss`: jagged tensors and counts."""

    def nested(x):
        parts = [row[:n] for row, n in zip(x, micro.responses, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    data = {
        "response_mask": nested(micro.mask.long()),
        "old_log_probs": nested(micro.old),
        "ref_log_prob": nested(micro.ref),
        "advantages": nested(micro.advantages),
    }
    if micro.weights is not None:
        data["rollout_is_weights"] = nested(micro.weights)
    data |= _lengths(micro.prompts, micro.responses)
    counts = {k: NonTensorData(v) for k, v in config.global_batch_info.items()}
    return TensorDict(data | counts, batch_size=[len(micro.prompts)])


def _lengths(prompts, responses):
    """Token ids do not matter to a loss, only how many there are."""

    def nested(sizes):
        ids = [torch.zeros(n, dtype=torch.long) for n in sizes]
        return torch.nested.as_nested_tensor(ids, layout=torch.jagged)

    return {"prompts": nested(prompts), "responses": nested(responses)}
