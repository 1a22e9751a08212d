"""Other releases of verl beside the installed one, and what each makes of a case.

`make setup` unpacks each into a folder of its own. A release runs in a process of its own with
that folder in front on its path, so that everything else, Megatron-Core included, is the same.
"""

import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cpnorm import oracle, transformer
from cpnorm.batch import batch
from cpnorm.case import Case, losses, modes
from cpnorm.engine.result import RankResult, Step, joined
from cpnorm.ranks import World
from cpnorm.sources import folder
from cpnorm.transformer import Model

BESIDE, INSTALLED = ("0.8.0", "0.9.0"), "0.9.1"
RELEASES = (*BESIDE, INSTALLED)
SEEDS = "verl.workers.engine.megatron.transformer_impl.set_random_seed"
"""Does nothing here: verl 0.8.0 counts the CPU as a device and seeds CUDA there. No step draws."""

GATHER = "verl.models.mcore.model_forward.postprocess_thd_engine"
"""Up to 0.9.0 it gathers into a buffer of torch's default dtype, whatever the log-probabilities
are. In an exact run the default dtype is float64 there."""

MODEL = Model()
CLIP_VALUE = 0.5  # verl's default cliprange_value
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # and its tau_pos, tau_neg


class Job(NamedTuple):
    """A case, the loss function bound to the engine (one of `engine.bindings.BINDINGS`), and
    whether float32 steps are taken out, see `cpnorm.engine.float64` and `GATHER`."""

    case: Case
    binding: str = "actor"
    exact: bool = True


def run(release: str, *calls: tuple, timeout: float = 300.0) -> list:
    """Results of `calls`, tuples of a function and its arguments, in one process that sees verl
    `release`.

    Functions, arguments and results travel by value, pickled; a function lives in a module that the
    process can import. `timeout` is in seconds. `ValueError` for a release not in `RELEASES`,
    `FileNotFoundError` for one that is not there, `RuntimeError` with the error's last line if the
    process fails, sees another release, or takes too long.
    """
    path = os.pathsep.join([*_in_front(release), *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory() as scratch:
        asked, results = Path(scratch, "calls"), Path(scratch, "results")
        torch.save(calls, asked)
        code = "from cpnorm.releases import _child; _child()"
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code, release, asked, results],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"verl {release} did not finish in {timeout:g} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exited with {done.returncode}"]
            raise RuntimeError(f"verl {release}: {lines[-1]}")
        return torch.load(results, weights_only=False)


def steps(jobs: list[Job]) -> list[Step | str]:
    """Each job's step, or the message with which verl refuses it. All need as many ranks as the
    first."""
    with World(jobs[0].case.dp * jobs[0].case.cp) as world:
        results = [world.run(_on_rank, job) for job in jobs]
    return [one[0] if isinstance(one[0], str) else joined(one) for one in results]


def aggregated(case: Case) -> dict[str, dict[str, Tensor]]:
    """Gradient by the log-probability of every row, `(T,)`, for each policy loss and mode that the
    release knows, the whole of `case` in one micro-batch."""
    with World(1) as world:
        return world.run(_aggregated_on_rank, case)[0]


def critics_mode(*overrides: str) -> str:
    """The critic's `loss_agg_mode` in the release's own `ppo_megatron_trainer` configuration."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(folder("verl") / "trainer/config"), version_base=None):
        return compose("ppo_megatron_trainer", list(overrides)).critic.loss_agg_mode


def reference(job: Job, mode: str) -> dict[str, Tensor]:
    """Gradient of the job's policy or value loss aggregated in `mode`, without any parallelism.

    Plain torch, float64: GSPO and PPO as `cpnorm.oracle` writes them, SAPO and the value loss as
    written here.
    """
    case = replace(job.case, mode=mode, dp=1, cp=1)
    token_loss = {**oracle.LOSSES, "sapo": sapo}[case.loss]
    if job.binding == "critic":
        token_loss = value
    data = batch(case, *oracle.model_outputs(case, MODEL, transformer.weights(MODEL, case.seed)))

    def loss(rows):
        parts, found = rows.split([s.length for s in case.sequences]), []
        for s, (part, seq) in enumerate(zip(parts, case.sequences, strict=True)):
            old, advantages, mask = (
                x[s, : seq.response] for x in (data.old, data.advantages, data.mask)
            )
            new = part[seq.prompt - 1 : seq.length - 1]
            found.append(token_loss(new[mask], old[mask], advantages[mask], case))
        return oracle.aggregate(found, case)

    return oracle.gradient(case, MODEL, loss)[1]


def sapo(new: Tensor, old: Tensor, advantages: Tensor, case: Case) -> Tensor:
    """SAPO's token losses (arXiv 2511.20347), `(n,)`: a sigmoid in place of the clip."""
    tau = torch.full_like(advantages, TAU_NEGATIVE).masked_fill(advantages > 0, TAU_POSITIVE)
    gate = torch.sigmoid(tau * ((new - old).exp() - 1)) * 4 / tau
    return -gate * advantages


def value(new: Tensor, old: Tensor, returns: Tensor, case: Case) -> Tensor:
    """PPO's clipped value losses by token, `(n,)`: values `new`, values at sampling `old`."""
    clipped = old + (new - old).clamp(-CLIP_VALUE, CLIP_VALUE)
    return torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) / 2


def _in_front(release):
    """What to put in front on the path: nothing for the installed release."""
    if release not in RELEASES:
        raise ValueError(f"release is {release!r}, allowed is one of {', '.join(RELEASES)}")
    if release in BESIDE:
        place = Path(sys.prefix, "releases", f"verl-{release}")
        if not (place / "verl").is_dir():
            raise FileNotFoundError(f"verl {release} is not set up: run `make setup`")
        return [str(place)]
    if (have := metadata.version("verl")) != release:
        raise FileNotFoundError(f"verl {have} is installed, not {release}: run `make setup`")
    return []


def _child():
    """The life of the process: calls in, results out."""
    release, asked, results = sys.argv[1:]
    if (seen := metadata.version("verl")) != release:
        raise ImportError(f"the process sees {seen}")
    calls = torch.load(asked, weights_only=False)
    torch.save([function(*args) for function, *args in calls], results)


def _on_rank(job) -> RankResult | str:
    """A refusal comes back as its message: verl raises it on all ranks alike."""
    from cpnorm.engine.bindings import BINDINGS
    from cpnorm.engine.step import run_rank

    gather = pkgutil.resolve_name(GATHER)
    gather = in_float64(gather) if job.exact else gather
    with mock.patch(SEEDS), mock.patch(GATHER, gather):
        try:
            return run_rank(job.case, MODEL, job.exact, BINDINGS[job.binding])
        except ValueError as error:
            return str(error)


def in_float64(function):
    """`function` called while torch's default dtype is float64."""

    def wide(*args, **options):
        torch.set_default_dtype(torch.float64)
        try:
            return function(*args, **options)
        finally:
            torch.set_default_dtype(torch.float32)

    return wide


def _aggregated_on_rank(case):
    from cpnorm.losses import actor_config, columns, micro_batch, policy_loss

    data = batch(case)

    def gradient(case):
        micro, leaf = micro_batch(case, data, range(case.B)), data.rows.clone().requires_grad_()
        config = actor_config(case)
        loss = policy_loss(config, micro, columns(leaf, micro), micro.mask, case.seed)
        return torch.autograd.grad(loss, leaf)[0]

    return {
        loss: {mode: gradient(replace(case, loss=loss, mode=mode)) for mode in modes()}
        for loss in losses()
    }
