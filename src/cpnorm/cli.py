"""The command `cpnorm`."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

app = typer.Typer(
    help="Does a sequence-mean policy loss keep its meaning under context parallelism?",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's own. Returns the exit status.

    An expected error is one sentence on stderr and exit status 2.
    """
    try:
        return app(argv, prog_name="cpnorm", standalone_mode=False) or 0
    except typer.Abort:
        return 130
    except typer.TyperException as error:  # bad usage: an unknown option, a missing argument
        sentence = error.format_message().rstrip(".")
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed: pip install 'cpnorm[run]' has what a run needs"
    except (ValueError, OSError) as error:
        sentence = str(error)
    print(f"cpnorm: {' '.join(sentence.split())}.", file=sys.stderr)
    return 2


@app.callback()
def _command():
    pass


@app.command()
def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORD", show_default=False),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Sequences of one mini-batch, a prompt's and a response's tokens on each line.",
        ),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(min=1, help="Data-parallel replicas, if the configuration lacks GPUs."),
    ] = None,
    line: Annotated[
        int | None,
        typer.Option(min=1, help="Which launch of a script, where it has more than one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Say what a run of verl does to its policy loss, and whether that is safe.

    RUN is one of: a shell script or a saved command line with python3 -m verl.trainer.main_ppo; a
    YAML file, a whole trainer configuration or its actor_rollout_ref part; - for one of these on
    standard input; overrides alone, on verl's defaults; or a command line's own words after --.

    A WORD key=value is one more override, NAME=value gives a variable that a script reads. Nothing
    is run or imported. What a script's text does not say is named.

    Safe: nothing read here makes verl refuse it, and the optimizer sees the gradient of the
    objective that loss_agg_mode names, up to the printed factor T/K. Not safe: verl raises, the
    loss is another than the configured one, it depends on the micro-batches, or its scale is off by
    more than T/K. Not covered: the book does not say. Only the actor's policy loss is judged.

    \b
    Exit status
      0  safe
      1  not safe, or not covered
      2  unusable input, or verl itself refuses the configuration

    \b
    Examples
      cpnorm explain train.sh
      cpnorm explain train.sh NNODES=2 MODEL_PATH=/models/Qwen3-8B
      cpnorm explain run.yaml actor_rollout_ref.actor.megatron.context_parallel_size=4
      cpnorm explain -- python3 -m verl.trainer.main_ppo model_engine=megatron trainer.nnodes=2
      cpnorm explain train.sh --line 12
      cpnorm explain model_engine=megatron actor_rollout_ref.actor.use_dynamic_bsz=True
      cpnorm explain run.yaml --lengths lengths.txt --json | jq .status
    """
    from cpnorm import user_file
    from cpnorm.explain import judged
    from cpnorm.launch import read
    from cpnorm.verdict import show

    sequences = user_file.read_lengths(lengths) if lengths is not None else None
    verdict = judged(read(run, words or (), line), sequences, dp)
    if as_json:
        print(verdict.to_json())
    else:
        show(verdict)
    return verdict.exit_status


@app.command()
def check(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", show_default=False)] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]", show_default=False)] = None,
    line: Annotated[
        int | None,
        typer.Option(min=1, help="Which launch of a script, where it has more than one."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the ranks run.")] = "cpu",
):
    """Run the topology and loss of a run of verl, scaled down to a tiny model, and compare.

    RUN and WORD are those of cpnorm explain, whose findings come first. Then the installed verl and
    Megatron-Core take one training step in the DP x CP x TP x PP of RUN, with its policy loss, in
    each regime that is possible. The gradient is compared with plain torch without any parallelism,
    parameter by parameter. Without RUN: GSPO on two replicas of two context-parallel ranks.

    On cpu the ranks are processes of this machine; replicas above two are left out. On cuda they
    take its GPUs, and share one that is alone. Under torchrun they are the ranks it started, and
    all of them are used.

    \b
    Exit status
      0  agrees, and cpnorm explain finds the run safe
      1  disagrees, or a rank failed: verl's or Megatron's own error is printed; or agrees, but the
         run is not safe or not covered
      2  unusable input, or verl itself refuses the configuration

    \b
    Examples
      cpnorm check
      cpnorm check train.sh NNODES=2
      cpnorm check run.yaml actor_rollout_ref.actor.megatron.context_parallel_size=4
      cpnorm check run.yaml --device cuda
      torchrun --nnodes 2 --nproc-per-node 8 ... -m cpnorm check run.yaml --device cuda
    """
    import torch.distributed as dist

    from cpnorm import own_run
    from cpnorm.explain import explain
    from cpnorm.launch import read
    from cpnorm.ranks import RankError
    from cpnorm.verl_config import load
    from cpnorm.which_regime import regimes

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, allowed is cpu or cuda")
    launch = read(*own_run.DEFAULT) if run is None else read(run, words or (), line)
    configuration = load(launch)
    verdict = explain(configuration, source=launch.source)
    names = regimes(configuration.settings)[0]
    ranks = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else None
    first = ranks is None or os.environ["RANK"] == "0"
    jobs = own_run.plan(configuration.settings, names, ranks, device)
    try:
        with own_run.progress(len(jobs), first) as say:
            results = own_run.run(jobs, device, say)
    except RankError as error:
        if first:
            own_run.show_before(verdict, configuration)
        print(f"cpnorm: {error}", file=sys.stderr)
        return 1
    if first:
        own_run.show_before(verdict, configuration)
        own_run.show(results, device, verdict)
    return verdict.exit_status if own_run.agree(results) else 1


@app.command()
def walkthrough():
    """Print the book as one text for a pull-request or issue discussion, in GitHub's Markdown.

    \b
    Examples
      cpnorm walkthrough > comment.md
      cpnorm walkthrough | gh pr comment 7915 --body-file -
    """
    from cpnorm.walkthrough import repository, text

    print(text(repository()), end="")


@app.command()
def releases(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False):
    """List the releases of verl and Megatron that were examined, and whether yours is one of them.

    Of each, the facts that a verdict rests on. They hold while the functions they were read from
    are as they were: those of the installed releases are compared.

    \b
    Examples
      cpnorm releases
      cpnorm releases --json | jq '.[] | select(.installed)'
    """
    import json

    from cpnorm.examine import in_words, listed

    found = listed()
    print(json.dumps(found, indent=2) if as_json else "\n".join(map(in_words, found)))
