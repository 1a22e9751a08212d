"""One training step of a `Case` through verl's Megatron engine, as one rank runs it.

verl's `MegatronEngineWithLMHead` is constructed by its own constructor and runs its own
`forward_backward_batch`. Replaced are its `initialize`, which loads a Hugging Face model through a
bridge, by the tiny model, and one copy, see `Engine._routed_num_tokens`.
"""

import functools
import hashlib
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from cpnorm import transformer
from cpnorm.batch import Batch, batch
from cpnorm.case import Case, Sequence
from cpnorm.engine.cuda_on_cpu import cuda_on_cpu, undefined_is_none
from cpnorm.engine.float64 import float64
from cpnorm.engine.model import build, cut_dimension, parameters
from cpnorm.engine.result import RankResult
from cpnorm.losses import actor_config
from cpnorm.oracle import model_outputs
from cpnorm.topology import topology
from cpnorm.transformer import Model


class Engine(MegatronEngineWithLMHead):
    """verl's engine on the tiny model."""

    device = "cpu"

    def initialize(self, case: Case, model: Model, weights: dict[str, torch.Tensor]) -> None:
        """Build the model in place of loading one. Records what Megatron divides by."""
        self.module = build(case, model, weights, self.device)
        self.tf_config = self.module[0].config
        self.tokens, self.divisor = [], None
        self.tf_config.finalize_model_grads_func = self.finalize
        self.tf_config.no_sync_func = [chunk.no_sync for chunk in self.module]
        if len(self.module) == 1:
            self.tf_config.no_sync_func = self.module[0].no_sync

    def finalize(self, model, num_tokens=None, **options):
        finalize_model_grads(model, num_tokens, **options)
        self.divisor = None if num_tokens is None else int(num_tokens)

    def _routed_num_tokens(self, data: TensorDict) -> torch.Tensor:  # verl 0.8.0 has none
        """A copy of verl's count. On a GPU `.to(device)` makes it; where the batch already lies on
        the device, verl 0.9.1's all-reduce writes into `input_ids.offsets()`."""
        return super()._routed_num_tokens(data).clone()

    def postprocess_micro_batch_func(self, output, data, *args, **kwargs):
        self.tokens.append(int(data["input_ids"].offsets()[-1]))
        return super().postprocess_micro_batch_func(output, data, *args, **kwargs)


def engine_config(case: Case) -> McoreEngineConfig:
    """verl's engine configuration of the topology: THD, static CP, no fused kernels."""
    return McoreEngineConfig(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        use_dynamic_bsz=case.max_token_len is not None,
        use_remove_padding=True,
        use_mbridge=True,
    )


MODEL_CONFIG = SimpleNamespace(
    mtp=SimpleNamespace(enable=False, enable_train=False),
    tokenizer=SimpleNamespace(pad_token_id=0),
    hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]),
)
"""What the engine asks of a Hugging Face configuration: no multi-token prediction, a plain GPT."""


@functools.lru_cache(maxsize=64)
def numbers(
    sequences: tuple[Sequence, ...], seed: int, dtype: str, model: Model
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], Batch]:
    """Weights, token ids and batch of a case: the same in every topology, so worked out once.

    Do not write into them.
    """
    case = Case(sequences=sequences, seed=seed, dtype=dtype)
    weights = transformer.weights(model, seed, getattr(torch, dtype))
    outputs = model_outputs(case, model, weights)
    return weights, transformer.token_ids(case, model), batch(case, *outputs)


def data_of_replica(case: Case, ids: list[torch.Tensor], numbers: Batch, d: int) -> TensorDict:
    """The replica's part of the mini-batch as verl's trainer hands it to the engine: nested
    tensors without padding, and the numbers of the whole mini-batch beside them."""
    size = case.B // case.D
    mine = range(d * size, (d + 1) * size)
    seqs = case.sequences

    def nested(parts):
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    def columns(table):
        return nested(table[s, : seqs[s].response] for s in mine)

    mask = [torch.tensor(seqs[s].counted) for s in mine]
    prompt = [torch.zeros(seqs[s].prompt, dtype=torch.int64) for s in mine]
    fields = {
        "input_ids": nested(ids[s] for s in mine),
        "prompts": nested(ids[s][: seqs[s].prompt] for s in mine),
        "responses": nested(ids[s][seqs[s].prompt :] for s in mine),
        "response_mask": nested(mask),
        "loss_mask": nested(torch.cat(pair) for pair in zip(prompt, mask, strict=True)),
        "old_log_probs": columns(numbers.old),
        "advantages": columns(numbers.advantages),
        "temperature": torch.ones(size),
    }
    if case.kl_coef:
        fields["ref_log_prob"] = columns(numbers.ref)
    if case.rollout_weights:
        fields["rollout_is_weights"] = columns(numbers.weights)
    data = tu.get_tensordict(fields)
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=case.max_token_len is not None,
        micro_batch_size_per_gpu=case.micro_batch_size,
        max_token_len_per_gpu=case.max_token_len,
        global_batch_size=case.B,
        calculate_entropy=case.entropy_coef != 0,
    )
    return data


def run_rank(
    case: Case,
    model: Model,
    exact: bool = False,
    engine_class: type[Engine] = Engine,
    device: str = "cpu",
) -> RankResult:
    """Run the step on this rank of a started world of `dp * cp * tp * pp` ranks.

    On "cuda" nothing is answered in CUDA's place, and the rank's GPU is the current one; only
    `undefined_is_none` applies.

    `exact` takes Megatron-Core's float32 steps out, see `cpnorm.engine.float64`. `engine_class` is
    verl's engine or one of `cpnorm.engine.variants`.
    """
    weights, ids, brought = numbers(case.sequences, case.seed, case.dtype, model)
    config = actor_config(
        case,
        entropy_coeff=case.entropy_coef,
        use_kl_loss=case.kl_coef != 0,
        kl_loss_coef=case.kl_coef,
    )
    float32 = float64() if exact else nullcontext()
    stand_in = cuda_on_cpu() if device == "cpu" else undefined_is_none()
    with stand_in, float32, topology(case.dp, case.cp, case.tp, case.pp, case.vpp):
        if device == "cuda":
            model_parallel_cuda_manual_seed(case.seed)
        engine = engine_class(MODEL_CONFIG, engine_config(case), None, None)
        engine.device = device
        engine.initialize(case, model, weights)
        data = data_of_replica(case, ids, brought, mpu.get_data_parallel_rank())
        torch.manual_seed(case.seed)  # clip_cov draws: the ranks of a CP group must draw alike
        output = engine.forward_backward_batch(data, functools.partial(ppo_loss, config=config))
        return _result(engine, output)


def _result(engine: Engine, output: dict) -> RankResult:
    gradients = {
        name: (parameter.main_grad.to("cpu", copy=True), cut_dimension(parameter))
        for chunk in engine.module
        for name, parameter in parameters(chunk.module)
    }
    digest = hashlib.sha256()
    for name in sorted(gradients):
        digest.update(name.encode() + gradients[name][0].numpy().tobytes())
    dp, cp = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    return RankResult(
        dp=dp,
        cp=cp,
        tp=mpu.get_tensor_model_parallel_rank(),
        pp=mpu.get_pipeline_model_parallel_rank(),
        gradients=gradients if dp == cp == 0 else {},
        digest=digest.hexdigest(),
        K=engine.divisor,
        tokens=tuple(engine.tokens),
        loss=sum(output["loss"]) if output else None,
    )
