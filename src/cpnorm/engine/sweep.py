"""The whole engine in every topology, against the oracle and against itself without sharding.

`python -m cpnorm.engine FOLDER` runs all of it and writes the evidence into FOLDER.
"""

import functools
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm

from cpnorm import check, engine, oracle, transformer
from cpnorm.batch import batch
from cpnorm.case import REGIMES, Case, Sequence, losses, modes
from cpnorm.evidence import Record
from cpnorm.losses import actor_config, columns, micro_batch, policy_loss
from cpnorm.ranks import RankError, World
from cpnorm.transformer import Model

SEQUENCES = (
    Sequence(3, 5),
    Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
    Sequence(1, 1),
    Sequence(21, 6),
    Sequence(13, 3),
    Sequence(6, 13, (1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)),
    Sequence(5, 4, (0, 0, 0, 0)),
    Sequence(7, 3),
)
"""Lengths that no alignment divides, prompts that straddle chunk borders, tool tokens that do not
count, a response of which nothing counts, and replicas and micro-batches of unequal tokens.

No micro-batch of the losses' cases has just two counted tokens: their covariances with the
advantages are then equal, `(-a)(-b) = a b`, and rounding decides which of the two `kl_cov` takes.
"""

STAGES = ((1, None), (2, None), (2, 2))
SOME = (
    {"dp": 2, "cp": 2},
    {"cp": 4},
    {"cp": 2, "tp": 2},
    {"cp": 2, "pp": 2},
    {"cp": 2, "pp": 2, "vpp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
)
LOSSES_AT = (
    {"dp": 2, "cp": 2},
    {"dp": 2, "cp": 2, "regime": "averaging"},
    {"cp": 4, "rollout_weights": True},
    {"cp": 2, "tp": 2},
    {"cp": 2, "pp": 2},
    {"cp": 2, "pp": 2, "vpp": 2},
)
EXPERTS = (None, 4)


class Job(NamedTuple):
    """What `engine.run` is asked."""

    case: Case
    model: Model
    exact: bool

    @property
    def size(self) -> int:
        """Ranks."""
        return self.case.dp * self.case.cp * self.case.tp * self.case.pp


def topologies() -> list[dict]:
    """DP (1, 2, 4) x CP (1, 2, 4, 8) x TP (1, 2) x PP (1, 2, 2 interleaved) of at most 8 ranks."""
    sizes = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2), STAGES)
    return [
        {"dp": dp, "cp": cp, "tp": tp, "pp": pp, "vpp": vpp}
        for dp, cp, tp, (pp, vpp) in sizes
        if dp * cp * tp * pp <= 8
    ]


def cases() -> list[Job]:
    """Every run of the sweep, by world size.

    Every topology x dense or MoE x regime x as Megatron computes or exactly. At some topologies
    besides: KL and entropy terms with rollout weights, dynamic micro-batches, and every policy loss
    x aggregation mode. Last, what is refused.
    """
    kinds = [
        {"experts": experts, "exact": exact, "regime": regime}
        for experts, regime, exact in itertools.product(EXPERTS, REGIMES, (True, False))
    ]
    terms = {"kl_coef": 0.1, "entropy_coef": 0.05, "rollout_weights": True}
    factors = [(mode, 7 if mode.endswith("norm") else None) for mode in modes()]
    factors.append(("seq-mean-token-sum-norm", None))
    jobs = [_job(**sizes, **kind) for sizes in topologies() for kind in kinds]
    jobs += [_job(**sizes, **kind, **terms) for sizes in SOME for kind in kinds]
    jobs += [
        _job(**sizes, **kind, max_token_len=32 // sizes["cp"])
        for sizes in SOME
        for kind in kinds
        if kind["exact"]
    ]
    jobs += [
        _job(**options, loss=loss, mode=mode, loss_scale_factor=factor)
        for options in LOSSES_AT
        for loss, (mode, factor) in itertools.product(losses(), factors)
    ]
    jobs.append(_job(cp=2, layout="contiguous"))
    return sorted(dict.fromkeys(jobs), key=lambda job: job.size)


def _job(experts=None, exact=True, loss="gspo", mode="seq-mean-token-mean", **options):
    """A job of two micro-batches a replica or more; interleaving takes twice the layers."""
    case = Case(
        sequences=SEQUENCES,
        micro_batch_size=1 if options.get("dp") == 4 else 2,
        loss=loss,
        mode=mode,
        clip_low=0.05,
        clip_high=0.1,
        **options,
    )
    return Job(case, Model(layers=4 if case.vpp else 2, experts=experts), exact)


def run(jobs: Iterable[Job], progress: bool = False) -> list[Record]:
    """Run them by world size, each size in one world, and compare each with its references.

    A loss that is additive over micro-batches (measured, `check.unsharded`) is compared with the
    oracle. One that is not, and every run that keeps Megatron's float32 steps, is compared with the
    engine's own run without sharding, see `unsharded`, which takes the same steps.

    A job that is refused or fails gives a record with a message, and the next one a new world.
    """
    jobs, world = list(jobs), None
    own = {job: unsharded(job) for job in jobs if not (job.exact and additive(job.case))}
    steps = dict.fromkeys(own.values())
    queue = sorted({**steps, **dict.fromkeys(jobs)}, key=lambda job: job.size)
    jobs, records = set(jobs), []
    try:
        for job in tqdm(queue, unit="case", leave=False, disable=not progress):
            if world is None or world.size != job.size:
                if world:
                    world.close()
                world = World(job.size)
            start = time.perf_counter()
            try:
                step = engine.run(world, *job)
            except (ValueError, RankError) as error:
                records.append(Record(**job._asdict(), message=_sentence(error)))
                if isinstance(error, RankError):
                    world = None
                continue
            seconds = round(time.perf_counter() - start, 2)
            if job in steps:
                steps[job] = step
            if job in jobs and additive(job.case):
                records.append(_record(job, step, seconds, "oracle", *reference(job)))
            if job in jobs and own.get(job, job) != job:
                records.append(_against_engine(job, step, seconds, steps[own[job]]))
    finally:
        if world:
            world.close()
    return records


def unsharded(job: Job) -> Job:
    """`job` without CP, TP and PP; if the loss is additive, also without DP."""
    sizes = {"cp": 1, "tp": 1, "pp": 1, "vpp": None}
    if additive(job.case):
        sizes |= {"dp": 1, "micro_batch_size": 2}
    return job._replace(case=replace(job.case, **sizes))


def additive(case: Case) -> bool:
    """Whether the losses of the case's micro-batches add up to that of the mini-batch."""
    plain = {"kl_coef": 0.0, "entropy_coef": 0.0, "max_token_len": None, "regime": "per-token"}
    return _additive(replace(case, cp=1, tp=1, pp=1, vpp=None, layout="zigzag", **plain))


@functools.cache
def _additive(case):
    return check.unsharded(case).additive


def reference(job: Job) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and loss of an additive job's mini-batch by the oracle, without any parallelism."""
    return _oracle(_whole(job.case), job.model)


def _whole(case):
    """The case in one micro-batch without any parallelism: what an additive loss depends on."""
    sizes = {"dp": 1, "cp": 1, "tp": 1, "pp": 1, "vpp": None, "micro_batch_size": case.B}
    return replace(case, **sizes, max_token_len=None, regime="per-token")


@functools.cache
def _oracle(case, model):
    """Loss and gradient by the oracle; a loss that it does not write is verl's own function."""
    weights = transformer.weights(model, case.seed, getattr(torch, case.dtype))
    data = batch(case, *oracle.model_outputs(case, model, weights))
    micro, config = micro_batch(case, data, range(case.B)), actor_config(case)

    def verl(rows):
        return policy_loss(config, micro, columns(rows, micro), micro.mask, case.seed)

    J, gradient = oracle.gradient(case, model, None if case.loss in oracle.LOSSES else verl)
    return gradient, float(J)


def _against_engine(job, step, seconds, alone):
    if alone is None:
        return Record(**job._asdict(), reference="engine", message="its reference failed")
    return _record(job, step, seconds, "engine", alone.gradients, alone.loss)


def _record(job, step, seconds, name, gradient, loss):
    agreement = engine.compare(step, gradient, loss)
    return Record(
        **job._asdict(),
        reference=name,
        T=step.T,
        K=step.K,
        predicted=step.predicted(job.case.cp),
        ratio=agreement.ratio,
        residual=agreement.residual,
        worst=max(agreement.by_name, key=agreement.by_name.get),
        loss_error=agreement.loss,
        seconds=seconds,
    )


def _sentence(error):
    """What happened, without the traceback's files."""
    if not isinstance(error, RankError):
        return str(error)
    return f"rank {error.rank} {error.what}: {error.traceback.strip().splitlines()[-1]}"
