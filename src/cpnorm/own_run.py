"""A user's topology and loss, scaled down to a tiny model, through the installed verl and Megatron.

Everything that the statement is about stays as configured: DP x CP x TP x PP, loss, aggregation
mode, clip bounds, coefficients of the KL and entropy terms, how micro-batches are made, the regime.
What only costs time is small: the model, the sequences, and data-parallel replicas above two, which
a run of one's own processes does not need. Other settings of a loss are those of `cpnorm.losses`.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

from rich.table import Table
from tqdm import tqdm

from cpnorm import engine
from cpnorm.case import Case, Sequence
from cpnorm.engine.result import EXACT
from cpnorm.engine.sweep import Job, additive, reference, unsharded
from cpnorm.ranks import World
from cpnorm.settings import Settings
from cpnorm.transformer import Model
from cpnorm.verdict import Verdict, show_findings, terminal
from cpnorm.verl_config import Configuration

DEFAULT = (
    "model_engine=megatron",
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=1",
    ),
)
"""What runs where nothing is given, as arguments of `launch.read`."""
MOST_RANKS = 32  # processes of our own, about 80 MiB each
SEQUENCES = (
    Sequence(3, 5),
    Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)),
    Sequence(6, 21),
    Sequence(13, 3),
    Sequence(1, 2),
    Sequence(6, 13, (1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0)),
    Sequence(2, 7),
    Sequence(7, 4),
)


@dataclass(frozen=True)
class Result:
    """A run of `case` against a reference: predicted and measured T/K, and the largest deviation of
    each parameter from that multiple of the reference's gradient, relative to the largest one."""

    case: Case
    reference: str
    predicted: float
    ratio: float
    by_name: dict[str, float]

    @property
    def judged(self) -> bool:
        """Whether the run is exact, so that it must agree to `EXACT`."""
        return self.case.dtype == "float64"

    @property
    def agrees(self) -> bool:
        """Whether T/K and every parameter are within `EXACT`."""
        return max(*self.by_name.values(), abs(self.ratio / self.predicted - 1)) <= EXACT


def plan(
    settings: Settings, regimes: list[str], ranks: int | None = None, device: str = "cpu"
) -> list[Job]:
    """What to run: a job a regime in float64, on "cuda" one in bfloat16 besides, in which
    Transformer Engine's attention runs where it is installed.

    `ranks` is the number of processes, if they are there already. `ValueError` for what the engine
    here does not run, or ranks that do not fit the topology.
    """
    s = settings
    for applies, what in (
        (s.strategy != "megatron", f"strategy {s.strategy}"),
        (s.dynamic_cp, "dynamic context parallelism, which no Megatron-Core release carries"),
        (not s.remove_padding, "the BSHD layout (use_remove_padding=False)"),
        (s.fused, "fused kernels (use_fused_kernels=True)"),
        (s.pad_to_length, "pad_to_length"),
        (s.megatron_fsdp, "Megatron-FSDP"),
        (s.ep > 1, f"expert parallelism (EP {s.ep})"),
        (s.distillation or s.mtp, "another loss beside the policy loss"),
        (s.may_replace_loss, "rollout_correction.bypass_mode, which may replace the policy loss"),
    ):
        if applies:
            raise ValueError(f"cpnorm check does not run {what}: see cpnorm explain")
    group = s.cp * s.tp * s.pp
    dp = min(s.D or 1, 2) if ranks is None else ranks // group
    if ranks is not None and dp * group != ranks:
        raise ValueError(f"{ranks} ranks were started, allowed is a multiple of {group}, CP TP PP")
    if ranks is None and dp * group > MOST_RANKS:
        raise ValueError(
            f"the topology needs {dp * group} ranks, allowed on one machine is {MOST_RANKS}: "
            "start it with torchrun on the cluster"
        )
    size = min(s.micro_batch or 1, 2)
    stages = s.pp * (s.vpp or 1)
    sequences = SEQUENCES * -(-dp * size * stages // len(SEQUENCES))
    micro_batches = len(sequences) // (dp * size) // s.pp * s.pp
    case = Case(
        sequences=sequences[: dp * size * micro_batches],
        dp=dp,
        cp=s.cp,
        tp=s.tp,
        pp=s.pp,
        vpp=s.vpp if s.pp > 1 else None,
        micro_batch_size=size,
        max_token_len=-(-64 // s.cp) if s.dynamic_batch else None,
        loss=s.loss,
        mode=s.mode,
        loss_scale_factor=s.loss_scale_factor,
        clip_low=0.2 if s.clip_low is None else s.clip_low,
        clip_high=0.2 if s.clip_high is None else s.clip_high,
        kl_coef=s.kl_coef if s.use_kl_loss else 0.0,
        entropy_coef=s.entropy_coef,
    )
    heads = math.lcm(4, s.tp)
    model = Model(
        layers=max(2, stages),
        heads=heads,
        groups=math.lcm(2, s.tp),
        hidden=8 * heads,
        ffn=16 * s.tp,
        vocab=64 * s.tp,
    )
    jobs = [Job(replace(case, regime=regime), model, exact=True) for regime in regimes]
    if device == "cuda":
        jobs += [
            job._replace(case=replace(job.case, dtype="bfloat16"), exact=False) for job in jobs
        ]
    return jobs


def run(jobs: list[Job], device: str, progress: Callable[[str], None]) -> list[Result]:
    """Run the jobs on one world of ranks on `device`, "cpu" or "cuda".

    A loss that is additive over micro-batches is compared with plain torch, another one with the
    engine at the same replicas and micro-batches without CP, TP and PP. `progress` is told each
    step before it begins. `RankError` when a rank fails.
    """
    progress("references, without parallelism")
    wanted = [_reference(job) for job in jobs]
    progress(f"{jobs[0].size} ranks start")
    results = []
    with World(jobs[0].size, device) as world:
        for job, (name, gradient, loss) in zip(jobs, wanted, strict=True):
            progress(f"a step in the {job.case.regime} regime")
            step = engine.run(world, *job)
            found = engine.compare(step, gradient, loss)
            predicted = step.predicted(job.case.cp)
            results.append(Result(job.case, name, predicted, found.ratio, found.by_name))
    return results


def _reference(job):
    if additive(job.case):
        return "plain torch", *reference(job)
    alone = unsharded(job)
    with World(alone.size) as world:
        step = engine.run(world, *alone)
    return "the engine without CP, TP, PP", step.gradients, step.loss


@contextmanager
def progress(jobs: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr over the steps that `run` announces, if it is a terminal."""
    bar = tqdm(total=2 + jobs, leave=False, disable=None if shown else True, file=sys.stderr)
    done = 0

    def say(step: str) -> None:
        nonlocal done
        bar.update(1 if done else 0)
        done += 1
        bar.set_description(step)

    with bar:
        yield say


def show_before(verdict: Verdict, configuration: Configuration) -> None:
    """Print what `cpnorm explain` finds, and what of the configuration the run leaves out."""
    s = configuration.settings
    show_findings(verdict)
    left_out = [f"{s.D - 2} of {s.D} replicas"] if (s.D or 0) > 2 else []
    left_out += [*configuration.unexamined, *configuration.neutral]
    if s.balancing not in (None, "none", ["none"]):
        left_out.append("the experts' auxiliary loss")
    text = "\nThe run of cpnorm check has a tiny dense model"
    text += f" and leaves out: {', '.join(left_out)}" if left_out else ""
    terminal().print(f"{text}\n")


def show(results: list[Result], device: str, verdict: Verdict) -> None:
    """Print what ran and how each parameter agrees, and what follows beside `verdict`, which is
    that of `cpnorm explain`. In colours on a terminal that takes them."""
    console, case = terminal(), results[0].case
    sizes = f"DP {case.dp} x CP {case.cp} x TP {case.tp} x PP {case.pp}"
    console.print(f"{sizes}, {case.loss} {case.mode}, a tiny model on {device}")
    console.print(", ".join(f"{name} {version(name)}" for name in ("verl", "megatron-core")))
    for one in results:
        console.print(
            f"\n{one.case.regime} regime, {one.case.dtype}, against {one.reference}; attention of "
            f"{_attention(one.case, device)}"
        )
        console.print(f"T/K predicted {one.predicted:.10f}, measured {one.ratio:.10f}")
        table = Table(box=None, pad_edge=False)
        table.add_column("parameter")
        table.add_column("deviation from T/K times the reference", justify="right")
        for name, error in one.by_name.items():
            table.add_row(name, f"{error:.1e}")
        console.print(table)
    word = "agrees" if agree(results) else "DISAGREES"
    if agree(results) and verdict.exit_status:
        what = "verl itself refuses the run" if verdict.refused else f"the run is {verdict.status}"
        word = f"what was run agrees with its reference, but {what}, as said above"
    console.print(f"\n{word}: T/K and every parameter in float64, to {EXACT:.0e}")


def agree(results: list[Result]) -> bool:
    """Whether all results that are judged agree with their references."""
    return all(one.agrees for one in results if one.judged)


def _attention(case, device):
    if engine.transformer_engine_runs(case, device):
        return f"Transformer Engine {version('transformer_engine')}"
    return "cpnorm, which gathers keys and values"
