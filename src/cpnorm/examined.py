"""What was examined: facts of releases, and fingerprints of the functions they were read from.

A fact holds for a release only while its functions are as they were examined. `python -m
cpnorm.examine` prints what to add for another release.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from cpnorm.fingerprint import Sources

CORE_ALGOS = "verl.trainer.ppo.core_algos"
EVERY, AUX, REGIME = "every verdict", "the auxiliary loss", "the regime"
CONFIGURED = "configured"


class Verl(NamedTuple):
    """What verl does with `calculate_per_token_loss=True`, and its policy losses.

    Whether `postprocess_micro_batch_func` reports a token count, refuses `seq-mean-token-mean`, and
    refuses the BSHD layout. `modes` has the mode in which a loss aggregates, where it does not do
    so as configured, None for a way of its own.
    """

    counts: bool
    guard: bool
    refuses_bshd: bool
    modes: dict[str, str | None]


class Megatron(NamedTuple):
    """Whether `initialize_model_parallel` takes `dynamic_context_parallel`, and what the per-token
    regime makes of the auxiliary loss: one of `AUX_RULES`, and the sizes (CP, TP) where it was
    measured. Both None in a release where it was not.
    """

    dynamic_groups: bool
    aux: str | None = None
    measured: tuple[tuple[int, int], ...] = ()


class Bridge(NamedTuple):
    """Providers that turn `calculate_per_token_loss` on at CP above 1."""

    per_token: tuple[str, ...]


AUX_RULES = {"1/(CP TP)": lambda C, tp: 1 / (C * tp), "1": lambda C, tp: C / C}
"""Factors of the auxiliary loss, of symbols, numbers or fractions CP and TP: against the unsharded
run, where no sequence needs padding and K = T."""

_SEQUENCES = "seq-mean-token-mean"
_SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
_QWEN = (
    "Qwen35VLModelProvider",
    "Qwen35VLMoEModelProvider",
    "Qwen3VLModelProvider",
    "Qwen3VLMoEModelProvider",
)

FACTS = {
    "verl": {
        "0.8.0": Verl(
            counts=False,
            guard=False,
            refuses_bshd=False,
            modes={"gspo": _SEQUENCES, "sapo": _SEQUENCES, "geo_mean": None},
        ),
        "0.9.0": Verl(
            counts=True,
            guard=True,
            refuses_bshd=True,
            modes={"gspo": _SEQUENCES, "sapo": _SEQUENCES, "geo_mean": None},
        ),
        "0.9.1": Verl(
            counts=True,
            guard=False,
            refuses_bshd=True,
            modes={"sapo": _SEQUENCES, "geo_mean": None},
        ),
    },
    "megatron-core": {
        "0.16.1": Megatron(dynamic_groups=False, aux="1/(CP TP)", measured=_SIZES),
        "0.18.0": Megatron(dynamic_groups=False, aux="1/(CP TP)", measured=_SIZES),
        "0.18.2": Megatron(dynamic_groups=False, aux="1/(CP TP)", measured=_SIZES),
        "0.19.2": Megatron(dynamic_groups=False, aux="1", measured=_SIZES),
    },
    "megatron-bridge": {"0.6.2": Bridge(per_token=_QWEN)},
}
"""Distribution -> version -> facts. Tests hold them to the sources of releases that are set up.

`tests/test_regimes.py` runs `measured` with the installed Megatron-Core: CI does with 0.16.1 and
0.19.2. With 0.18.0 and 0.18.2 it was run by hand, and `tests/test_engine.py` too.
"""

TABLES = {
    "verl": """
functions                                               0.8.0    0.9.0    0.9.1
# every verdict
verl.workers.engine.megatron.transformer_impl           2b4f7e26 5b6a7811 02e59909
  MegatronEngineWithLMHead.postprocess_micro_batch_func 8f485d20 4affbe2d b12d5d7e
  MegatronEngine._routed_num_tokens                     -        d39e26c2 d39e26c2
  MegatronEngine.forward_backward_batch                 f12b6fef 39842e7a 5e6f9e21
  MegatronEngineWithLMHead.forward_step                 60542e59 8230a9ba e2226805
  MegatronEngineWithLMHead.prepare_model_inputs         e83b9f90 e83b9f90 e83b9f90
  MegatronEngineWithLMHead.prepare_model_outputs        84dd2243 84dd2243 84dd2243
  MegatronEngineWithLMHead._lm_head_logits_processor    -        b712a279 b712a279
  MegatronEngine._build_tf_config                       de4ac59b fa2a14bb d5a6d394
  MegatronEngine._resolve_override_ddp_config           -        a3815b6b 2f280f20
  MegatronEngine._build_megatron_module                 7a0e5d4c d208bc87 d208bc87
  MegatronEngine._init_device_mesh                      dd79abab 9a98f2b3 9a98f2b3
  MegatronEngine.optimizer_step                         91ba7a5b efb1200b efb1200b
  MegatronEngine.get_data_parallel_size                 cccdb84a cccdb84a cccdb84a
  MegatronEngine.get_data_parallel_group                208e7201 d10c17d5 d10c17d5
  class MegatronEngineWithLMHead                        ca59a2fa ac0e2678 ac0e2678
  class MegatronEngine                                  653b6bf5 eb07bc3d eb07bc3d
verl.workers.utils.losses                               701a0bf7 c6dfeb10 c6dfeb10
  ppo_loss                                              cd94a0c7 cd94a0c7 cd94a0c7
verl.trainer.ppo.core_algos                             37fa248b 0ec87b90 a54b6d81
  agg_loss                                              000a13d2 51be00ba 51be00ba
  kl_penalty                                            2f7858dc 2f7858dc 2f7858dc
  get_policy_loss_fn                                    d082f8c0 d082f8c0 d082f8c0
verl.utils.torch_functional                             cb37d045 9855e101 9855e101
  masked_sum                                            cb34c8db cb34c8db cb34c8db
  masked_mean                                           0b90cb29 0b90cb29 0b90cb29
verl.workers.utils.padding                              f3cc823e f3cc823e 4e29a4af
  no_padding_2_padding                                  f3803f4b f3803f4b f3803f4b
verl.models.mcore.util                                  560b8a31 16ba46e4 37ae7f37
  postprocess_thd_engine                                acda4ea3 a0401e95 81e5747e
  preprocess_thd_engine                                 1b27c5e7 63e264c0 7f0ba56e
verl.models.mcore.model_forward                         e60c38fc 1e0f9d6a 1e0f9d6a
  gptmodel_forward_model_engine                         97ee6945 aab28602 aab28602
verl.models.mcore.registry                              e072a36f e072a36f e072a36f
  get_mcore_engine_forward_fn                           f1cef809 f1cef809 f1cef809
verl.utils.megatron.tensor_parallel                     c16638f9 d7c5cb16 d7c5cb16
  vocab_parallel_log_probs_from_logits                  0dc292c5 0dc292c5 0dc292c5
  vocab_parallel_entropy                                ebc5f020 ebc5f020 ebc5f020
verl.utils.megatron_utils                               9daae54f 86212859 4d2f479c
  register_megatron_training_hooks                      9e2a02a8 9e2a02a8 9e2a02a8
  make_megatron_module                                  2df1ae9f dc51b11a b58e8761
verl.utils.seqlen_balancing                             c114cd1a c114cd1a f0536d75
  rearrange_micro_batches                               c0a3f106 c0a3f106 9a741f57
verl.workers.engine.utils                               58a8b790 7e8d73c6 36f51f13
  prepare_micro_batches                                 11d37cff 11d37cff 11d37cff
verl.workers.engine.base                                11e0a338 361da5fa c3d0f88e
  BaseEngine.train_batch                                376d4500 376d4500 376d4500
  EngineRegistry                                        04d5aba2 a0922bc1 a0922bc1
verl.workers.engine_workers                             721f8664 22e8fe70 ff9a0ebd
  TrainingWorker.train_mini_batch                       dae95cac 32747226 df6c2dfb
  TrainingWorker.train_batch                            34e70f48 34e70f48 34e70f48
  ActorRolloutRefWorker.update_actor                    480e1cf2 480e1cf2 e01bdcf3
verl.trainer.main_ppo                                   e3fe6e73 7558a2f5 270ffe0d
  main                                                  5509778a e64c0be7 fbe44db9
verl.trainer.ppo.ray_trainer                            de58d295 32b2fd1a eb41f99c
  RayPPOTrainer.fit                                     7dda4b72 98576b0b c78dfc8e
  RayPPOTrainer._update_actor                           8e22dc3a 1c041718 1c041718
verl.trainer.ppo.v1.trainer_base                        -        74b8df43 198d8dd4
  PPOTrainer._compute_old_log_prob                      -        7d6b041c 7d6b041c
  PPOTrainer._compute_advantage                         -        516aabb7 516aabb7
  PPOTrainer._update_actor                              -        d50963bb d50963bb
verl.trainer.ppo.rollout_corr_helper                    b5b09c83 76315834 76315834
  apply_bypass_mode                                     b5b492b5 b5b492b5 b5b492b5
# policy loss
verl.trainer.ppo.core_algos                             37fa248b 0ec87b90 a54b6d81
  policy loss vanilla                                   cc97cb58 34ac988f 34ac988f
  policy loss dppo_tv                                   188b3718 104907df 104907df
  policy loss dppo_kl                                   dc339d74 c9b28c1b c9b28c1b
  policy loss gspo                                      6195c209 dcad7207 100585cb
  policy loss sapo                                      f1c7da5b 9a3f3866 9a3f3866
  policy loss gpg                                       fb2f168c a253e974 a253e974
  policy loss clip_cov                                  2493c8b3 b11b40d9 b11b40d9
  policy loss kl_cov                                    2b806ff6 2724ed43 2724ed43
  policy loss geo_mean                                  d99217a2 d99217a2 d99217a2
  policy loss cispo                                     c24a9113 b05e6def b05e6def
  policy loss bypass_mode                               41a2e045 f0b5b2f4 f0b5b2f4
  policy loss dro                                       -        cde64fd7 cde64fd7
# policy loss bypass_mode
verl.trainer.ppo.rollout_corr_helper                    b5b09c83 76315834 76315834
  compute_rollout_correction_and_rejection_mask         f4a2d7b7 0945e4b6 0945e4b6
""",
    "megatron-core": """
functions                                           0.16.1   0.18.0   0.18.2   0.19.2
# every verdict
megatron.core.pipeline_parallel.schedules           e2bdb6f1 946a71d2 946a71d2 9d3624f4
  forward_step_calc_loss                            dc3c7ab4 92115de5 92115de5 af9aa7d1
  forward_step                                      d0702535 4421b3fe 4421b3fe afacdb88
  backward_step                                     ecbc7e9e 90399e12 90399e12 90399e12
  forward_backward_no_pipelining                    2bbf0740 03f1739b 03f1739b 41962af0
  forward_backward_pipelining_without_interleaving  678d88ef 67aa3457 67aa3457 5da842db
  forward_backward_pipelining_with_interleaving     6e4d451c eb8f337d eb8f337d c01501a2
megatron.core.distributed.finalize_model_grads      b81ca035 077320ba 077320ba 4b9cfce7
  finalize_model_grads                              b071acc2 1225a48d 1225a48d f1e88437
megatron.core.distributed.distributed_data_parallel e8ae6762 5b0a65ea 5b0a65ea 0c98de1a
  DistributedDataParallel.__init__                  36397e2d 3c1604da 3c1604da 942db2c8
  DistributedDataParallel.start_grad_sync           d74ea432 d74ea432 d74ea432 d74ea432
  DistributedDataParallel.finish_grad_sync          a091dd3f a091dd3f a091dd3f a091dd3f
  DistributedDataParallel.scale_gradients           de34fb3e de34fb3e de34fb3e de34fb3e
megatron.core.distributed.param_and_grad_buffer     e10c283e 3fa53286 3fa53286 065661bc
  _ParamAndGradBucketGroup.start_grad_sync          9de2985b bb499783 bb499783 c0928d68
  _ParamAndGradBucketGroup.finish_grad_sync         34710e80 eda3fb9c eda3fb9c eda3fb9c
  _ParamAndGradBuffer.scale_gradients               f3ebc44c 1f795944 1f795944 1f795944
megatron.core.parallel_state                        c94fa8ea 6b284e25 6b284e25 1f6e23a0
  initialize_model_parallel                         c57128c7 958a2994 958a2994 ef186a21
# the auxiliary loss
megatron.core.transformer.moe.router                8a4a45f2 3f397084 3f397084 1a1b6a2b
  TopKRouter.attach_and_log_load_balancing_loss     e4715093 122d9b1a 122d9b1a 96f68d1f
  TopKRouter._apply_aux_loss                        bb3679c9 bb3679c9 bb3679c9 bb3679c9
megatron.core.transformer.moe.moe_utils             d73a6eb8 629c4853 629c4853 b20192e7
  switch_load_balancing_loss_func                   55a626aa 4004d53f 4004d53f 4004d53f
  MoEAuxLossAutoScaler                              1015c6c7 1015c6c7 1015c6c7 1015c6c7
""",
    "megatron-bridge": """
functions                                         0.6.2
# the regime
megatron.bridge.models.qwen_vl.qwen35_vl_provider a9ee9c2d
  Qwen35VLModelProvider.finalize                  ec26bf8c
  Qwen35VLMoEModelProvider.finalize               ec26bf8c
megatron.bridge.models.qwen_vl.qwen3_vl_provider  4d607a2c
  Qwen3VLModelProvider.finalize                   ec26bf8c
  Qwen3VLMoEModelProvider.finalize                318821f3
""",
}
"""Fingerprints by release, "-" where it lacks the function: a line with `#` says which part of a
verdict rests on what follows, a module's own line has the fingerprint of its whole file."""


class Row(NamedTuple):
    """One line of a table; `name` is "" for a module's own, `prints` has None for "-"."""

    part: str
    module: str
    name: str
    prints: dict[str, str | None]


class Changed(NamedTuple):
    """A function that is not as in an examined release, and what rests on it."""

    part: str
    module: str
    name: str


@functools.cache
def rows(distribution: str) -> tuple[Row, ...]:
    """The table of a distribution."""
    head, *lines = TABLES[distribution].strip().splitlines()
    versions = head.split()[1:]
    found, part, module = [], "", ""
    for line in lines:
        if line.startswith("# "):
            part = line[2:]
            continue
        name, *prints = line.rsplit(maxsplit=len(versions))
        if name.startswith("  "):
            name = name.strip()
        else:
            module, name = name.strip(), ""
        prints = [None if p == "-" else p for p in prints]
        owner = name if name.startswith("policy loss ") else part
        found.append(Row(owner, module, name, dict(zip(versions, prints, strict=True))))
    return tuple(found)


def losses(version: str) -> tuple[str, ...]:
    """Policy losses of an examined release of verl, in its order."""
    every = (row for row in rows("verl") if row.part == row.name and row.prints[version])
    return tuple(row.name.removeprefix("policy loss ") for row in every)


def changed(
    distribution: str, version: str, seen: Sources, parts: Iterable[str] | None = None
) -> list[Changed]:
    """Functions of `seen` that are not as in an examined release, in the order of the table.

    Of all `parts` of a verdict, or of those given.
    """
    found, same = [], False
    for row in rows(distribution):
        if not row.name:  # a whole file, which spares parsing it
            same = row.prints[version] == seen.fingerprint(row.module)
        elif same or (parts is not None and row.part not in parts):
            continue
        elif row.prints[version] != seen.fingerprint(row.module, row.name):
            found.append(Changed(row.part, row.module, row.name))
    return found


def nearest(distribution: str, seen: Sources) -> str:
    """The examined release that fewest functions of `seen` differ from, the later of two."""
    versions = reversed(FACTS[distribution])
    return min(versions, key=lambda version: len(changed(distribution, version, seen)))
