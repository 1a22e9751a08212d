"""From a configuration's settings to a verdict: does its loss keep its meaning in this topology?"""

import functools
from collections.abc import Sequence

from cpnorm import case, claims, count, installed
from cpnorm.launch import MAIN, TRAINERS, Launch
from cpnorm.micro_batches import tokens
from cpnorm.verdict import STATUSES, Finding, Outcome, Ratio, Verdict
from cpnorm.verl_config import Configuration, load
from cpnorm.which_regime import architectures, regimes

RUN_RELEASE = "0.9.1"
RUN = {"D": 4, "cp": 8, "tp": 2, "pp": 2}
"""Largest sizes among the book's runs of the engine, of at most 8 ranks."""

SHARDING = ("objective", "ownership", "gather", "any-loss", "losses", "topologies")
NO_OBJECTIVE = {
    "geo_mean": "ends in a mean over the micro-batch: its gradient grows with their number",
    "clip_cov": "chooses tokens by statistics of the micro-batch: it depends on the split",
    "kl_cov": "chooses tokens by statistics of the micro-batch: it depends on the split",
}


def judged(
    launch: Launch, lengths: Sequence[case.Sequence] | None = None, dp: int | None = None
) -> Verdict:
    """The verdict on `launch`, with arguments and errors as of `explain`."""
    if launch.module not in TRAINERS:
        return another_trainer(launch.module)
    return explain(load(launch), lengths, dp, launch.source)


def explain(
    configuration: Configuration,
    lengths: Sequence[case.Sequence] | None = None,
    dp: int | None = None,
    source: str | None = None,
) -> Verdict:
    """The verdict on `configuration`.

    `lengths` are the sequences of one mini-batch in verl's order, `dp` the number of replicas where
    the settings do not say it, `source` where the configuration was read. `ValueError` if they do
    not fit together.
    """
    s = configuration.settings
    if dp is not None and s.D not in (None, dp):
        raise ValueError(f"dp is {dp}, allowed is {s.D}, which the configuration says")
    D = s.D if dp is None else dp
    path = {"read from": source} if source else {}
    path |= {"trainer": s.module + (" with trainer.use_v1" if s.use_v1 else "")}
    if s.strategy != "megatron":
        why = "Megatron has no part in it"
        text = f"strategy {s.strategy} does not take Megatron's engine, and this book no other"
        outcomes = [_nothing("another", text)]
        path |= {"strategy": s.strategy}
    elif differences := _differences(s):
        why = "it is not known of what was not examined"
        outcomes = [_nothing("another", *differences)]
        path |= _path(s, D)
    else:
        names, why = regimes(s)
        outcomes = [_outcome(configuration, D, name, lengths) for name in names]
        path |= _path(s, D) | {"aggregated as": installed.aggregated(s.loss, s.mode) or "its own"}
    statements = _statements(outcomes)
    versions = installed.versions()
    return Verdict(versions, path, why, tuple(outcomes), statements, configuration.refused)


def _differences(s):
    """Why nothing is known of a run, in sentences."""
    found = installed.differences(s.loss)
    return found if s.vanilla_mbridge else found + installed.bridge_differences()


def another_trainer(module: str) -> Verdict:
    """The verdict on a run of a trainer that is none of `TRAINERS`."""
    text = (
        f"{module} is not judged: the actor's policy loss in {', '.join(TRAINERS)} is, supervised, "
        "reward and distillation training and recipes with a trainer of their own are not"
    )
    why = "it is not known of what was not examined"
    outcomes = (_nothing("another", text),)
    return Verdict(installed.versions(), {"trainer": module}, why, outcomes, {}, ())


def _nothing(regime, *texts):
    """The outcome of what the book does not speak of."""
    return Outcome(regime, True, tuple(Finding("not covered", text) for text in texts), None)


def _statements(outcomes):
    register = _register()
    named = [n for o in outcomes for f in o.findings for n in f.statements if n in register]
    return {n: (register[n]["title"], register[n]["status"]) for n in dict.fromkeys(named)}


def _path(s, D):
    return {
        "strategy": "megatron",
        "layout": "THD" if s.remove_padding else "BSHD",
        "context parallelism": "dynamic" if s.dynamic_cp else "static",
        "fused kernels": s.fused,
        "DP": D,
        "CP": s.cp,
        "TP": s.tp,
        "PP": s.pp,
        "EP": s.ep,
        "loss": s.loss,
        "loss_agg_mode": s.mode,
        "micro-batches": _batches(s),
    }


def _batches(s):
    if s.dynamic_cp:
        return f"by verl's dynamic CP scheduler, up to {s.max_seqlen} tokens a rank"
    if s.dynamic_batch:
        return f"by tokens, up to {s.max_token_len} x {s.cp}"
    if s.micro_batch is None:
        return "size not given, verl needs ppo_micro_batch_size_per_gpu or use_dynamic_bsz"
    return f"of {s.micro_batch} sequences"


def _outcome(configuration, D, regime, lengths):
    s = configuration.settings
    raises = [Finding("not safe", text, names) for text, names in _raises(s, D, regime)]
    findings = [*raises, *_other_objective(s), *_uncovered(s, regime)]
    findings += [Finding("not covered", text) for text in configuration.unexamined.values()]
    ratio = None
    if regime == "averaging":
        findings.append(
            Finding(
                "safe",
                "Megatron averages over micro-batches and replicas and counts no tokens; verl's "
                "factors cancel that, T/K is 1",
                (*SHARDING, "regimes"),
            )
        )
    elif not installed.engine().counts:
        size = f"{D * s.cp} times" if D else f"D times {s.cp} times, D the replicas,"
        findings.append(
            Finding(
                "not safe",
                f"verl {installed.versions()['verl']} reports no tokens to Megatron, which then "
                f"does not divide: the gradient is {size} as large",
                ("two-tuple",),
            )
        )
    elif s.dynamic_cp:
        text = "what dynamic CP makes of the gradient is a question that the book leaves open"
        findings.append(Finding("not covered", text, ("dynamic-engine",)))
    elif not raises:
        ratio = _ratio(s, D, lengths)
        findings.append(_counted(s, ratio, alone=not findings))
    findings += _notes(configuration, D, regime)
    findings.sort(key=lambda f: -STATUSES.index(f.status))
    return Outcome(regime, not raises, tuple(findings), ratio)


def _raises(s, D, regime):
    """Why verl or Megatron ends the run, with statements."""
    engine = installed.engine()
    verl = f"verl {installed.versions()['verl']}"
    if s.dynamic_cp:
        if not installed.has_dynamic_groups():
            version = installed.versions()["megatron-core"]
            yield f"Megatron-Core {version} has no dynamic_context_parallel: verl raises", ()
        if D is not None and D * s.cp % 2:
            text = f"dynamic CP needs an even number of DP x CP ranks, not {D * s.cp}"
            yield f"{verl} raises: {text}", ()
        if s.vpp not in (None, 1) or s.pad_to_length or not s.remove_padding:
            text = "dynamic CP excludes virtual pipeline stages, pad_to_length and BSHD"
            yield f"{verl} raises: {text}", ()
    if not s.mbridge:
        yield f"{verl} raises: the Megatron engine needs use_mbridge", ()
    if D and s.micro_batch and not s.dynamic_batch and s.is_given("train_batch"):
        step = D * s.micro_batch
        if s.train_batch * s.responses % step and s.module == MAIN:
            text = f"data.train_batch_size times rollout.n is {s.train_batch * s.responses}"
            yield f"{verl} raises: {text}, no multiple of DP times micro-batch, {step}", ()
    if (s.vpp or 1) > 1 and not (s.dynamic_batch or s.dynamic_cp) and D and s.micro_batch:
        M = s.B // D // s.micro_batch
        if M % s.pp:
            text = f"virtual pipeline stages need micro-batches in groups of PP {s.pp}, not {M}"
            yield f"{verl} raises: {text}", ()
    if regime == "averaging":
        return
    if s.collective_average:
        yield "Megatron-Core raises: average_in_collective excludes calculate_per_token_loss", ()
    if not s.remove_padding and engine.refuses_bshd:
        yield f"{verl} raises ValueError: calculate_per_token_loss needs use_remove_padding", ()
    if engine.guard and s.mode == "seq-mean-token-mean" and not s.dynamic_cp:
        text = "its guard refuses seq-mean-token-mean with calculate_per_token_loss"
        yield f"{verl} raises ValueError: {text}, though the gradient were right", ("guard",)


def _other_objective(s):
    """Where the loss that runs is not the one that the configuration names."""
    real = installed.aggregated(s.loss, s.mode)
    if s.normalizes_weights:
        yield Finding(
            "not safe",
            "rollout_is_batch_normalize divides weights by their mean over the micro-batch: the "
            "loss depends on the split",
            ("objective", "losses"),
        )
    if s.loss in NO_OBJECTIVE:
        yield Finding("not safe", f"{s.loss} {NO_OBJECTIVE[s.loss]}", ("objective", "losses"))
    elif real != s.mode:
        yield Finding(
            "not safe",
            f"{s.loss} aggregates with {real} whatever loss_agg_mode says, and that says {s.mode}",
            ("objective", "losses"),
        )
    if "seq-mean-token-sum-norm" in (real, s.mode) and s.loss_scale_factor is None:
        yield Finding(
            "not safe",
            "seq-mean-token-sum-norm without loss_scale_factor divides by the width of the "
            "micro-batch: set actor.loss_scale_factor",
            ("objective", "losses"),
        )


def _trainer(s):
    return s.module if s.module != MAIN else f"{MAIN} without trainer.use_v1"


def _uncovered(s, regime):
    """What the book has not looked at."""
    texts = {
        "the BSHD layout (use_remove_padding=False) is not run in the book": not s.remove_padding,
        "fused kernels compute log-probabilities on a path that is not run in the book": s.fused,
        "Megatron-FSDP replaces the gradient reduction that the book describes": s.megatron_fsdp,
        "pad_to_length adds rows that are not run in the book": s.pad_to_length,
        f"EP {s.ep}: expert gradients are reduced over other ranks, the runs have EP 1": s.ep > 1,
        f"expert tensor parallelism {s.etp}: the runs have that of TP": s.etp not in (None, s.tp),
        "the router's z-loss is no part of the objective, and not measured in the book": (
            bool(s.z_loss)
        ),
        f"{_trainer(s)} writes bypass_mode over loss_mode, after the workers have taken theirs: "
        "which of the two losses trains is not run in the book": s.may_replace_loss,
        "verl imports model.external_lib, which may change any of this": s.external is not None,
        "rollout_rs rejects tokens after verl has counted them, or before, by trainer: which mask "
        "the count takes is not run in the book": s.rejection is not None,
        "mbridge may turn the experts' auxiliary loss on, and moe_aux_loss_coeff is set": (
            s.vanilla_mbridge and bool(s.aux_coef)
        ),
        "distillation adds another loss": s.distillation,
        "multi-token prediction adds another loss": s.mtp,
        "DeepSeek-V4 gives every CP rank consecutive tokens, the runs have the zigzag": (
            s.cp > 1 and any("DeepseekV4" in name for name in architectures(s))
        ),
    }
    yield from (Finding("not covered", text) for text, applies in texts.items() if applies)
    if s.balancing not in (None, "none", ["none"]):
        yield Finding("not covered", _auxiliary(s, regime))


def _auxiliary(s, regime):
    text = "the experts' auxiliary loss is no part of the objective"
    if regime == "averaging":
        return text
    core = f"Megatron-Core {installed.versions()['megatron-core']}"
    factor = installed.aux_factor(s.cp, s.tp)
    if factor is None:
        return f"{text}; what {core} makes of its gradient in the per-token regime was not measured"
    return (
        f"{text}; in the per-token regime {core} makes its gradient {factor} of what it is "
        "without sharding, measured with DP 1"
    )


def _counted(s, ratio, alone):
    """What the count of tokens does; `alone` if nothing else was found."""
    names = (*SHARDING, "cancellation", "token-count", "guard", "precision")
    if s.cp == 1:
        return Finding("safe", "with CP 1 the count of tokens is exact: T/K is 1", names)
    if ratio.exact and ratio.exact[1] == 0:
        return Finding(
            "not safe",
            f"every micro-batch has fewer than {s.cp} tokens: K is 0, and the gradient is "
            f"{ratio.exact[0]} times as large",
            names,
        )
    text = "the count of tokens multiplies the gradient by T/K"
    if alone:
        text = "sharding and counting multiply the gradient by T/K and do nothing else"
    return Finding("safe", text, names)


def _ratio(s, D, lengths):
    exact = None
    if lengths is not None:
        t = tokens(s, D, lengths)
        T, value = sum(map(sum, t)), count.ratio(t, s.cp)
        exact = T, count.divisor(t, s.cp), value
    least = 2 * (1 if s.dynamic_batch else s.micro_batch or 1)
    most = None
    if s.dynamic_batch:
        most = s.max_token_len * s.cp
    elif s.micro_batch and s.is_given("max_prompt") and s.is_given("max_response"):
        most = s.micro_batch * (s.max_prompt + s.max_response)
    sizes = {least, 128, 1024, 8192} | ({most} if most else set())
    sizes = sorted(t for t in sizes if least <= t <= (most or t))
    bounds = ((t, 1 + count.worst(t, s.cp) if t >= s.cp else None) for t in sizes)
    return Ratio(tuple(bounds), exact)


def _notes(configuration, D, regime):
    """What a reader should know that decides nothing."""
    s = configuration.settings
    if configuration.neutral:
        names = ", ".join(configuration.neutral)
        text = f"taken to compute the same gradient in another way, not run in the book: {names}"
        yield Finding("safe", text)
    if s.bypass and not s.may_replace_loss:
        yield Finding(
            "safe",
            "with trainer.use_v1 the switch algorithm.rollout_correction.bypass_mode does not "
            "change the loss: old log-probabilities are the rollout's",
        )
    if s.is_given("unused_remove_padding") and s.unused_remove_padding != s.remove_padding:
        yield Finding(
            "safe",
            "actor.megatron.use_remove_padding is overwritten by actor_rollout_ref.model."
            f"use_remove_padding, which is {s.remove_padding}",
        )
    if s.is_given("unused_fused") and s.unused_fused != s.fused:
        yield Finding(
            "safe",
            "actor.megatron.use_fused_kernels is overwritten by actor_rollout_ref.model."
            f"use_fused_kernels, which is {s.fused}",
        )
    if s.loss == "gspo" and s.mode != "seq-mean-token-mean":
        yield Finding(
            "safe", f"GSPO's paper aggregates with seq-mean-token-mean, here it is {s.mode}"
        )
    if s.per_token is False and regime == "per-token":
        yield Finding(
            "safe", "override_transformer_config sets calculate_per_token_loss=False, to no effect"
        )
    if s.dtype == "float16" and regime == "per-token":
        text = "the loss is multiplied by T/DP before backward, float16's loss scale must absorb it"
        yield Finding("safe", text, ("precision",))
    version = installed.versions()["verl"]
    if version != RUN_RELEASE:
        text = f"most runs of the book are verl {RUN_RELEASE}'s, few are {version}'s"
        yield Finding("safe", text)
    sizes = {"D": D or 1, "cp": s.cp, "tp": s.tp, "pp": s.pp}
    large = [f"{n.upper()} {v}" for n, v in sizes.items() if v > RUN[n]]
    if large:
        yield Finding(
            "safe",
            f"the book's runs of the engine end below {', '.join(large)}, its proof does not",
            ("cancellation",),
        )


@functools.cache
def _register():
    return claims.load()
