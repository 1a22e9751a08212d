"""The book as one text for a pull-request or issue discussion, in GitHub-flavoured Markdown.

Statements come from `claims.yml`, numbers from the records in `evidence/`, links from the installed
source. The same text is a page of the book, see `sphinx_walkthrough`.
"""

from pathlib import Path

from cpnorm import claims
from cpnorm.evidence import Evidence, load
from cpnorm.source_links import link

LIMIT = 65_536  # characters of a comment on GitHub

POST = (
    "verl.workers.engine.megatron.transformer_impl",
    "MegatronEngineWithLMHead.postprocess_micro_batch_func",
)
STEPS = (
    (
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        "seq-mean-token-mean",
        "`agg_loss` returns (D/B) Σ mean for a micro-batch",
    ),
    (
        "verl.models.mcore.util",
        "postprocess_thd_engine",
        "all_gather(output_list, output.detach()",
        "every CP rank gets all values and differentiates its own rows",
    ),
    (*POST, "loss * routed_num_tokens / dp_size", "× T/D"),
    (*POST, "// cp_size", "each CP rank reports ⌊t/C⌋ tokens"),
    (
        "megatron.core.pipeline_parallel.schedules",
        "forward_step_calc_loss",
        "if len(outputs) == 3",
        "three values: the schedule leaves the loss alone",
    ),
    (
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        " gradient_scaling_factor = 1.0",
        "gradients are summed over DP × CP",
    ),
    (
        "megatron.core.distributed.finalize_model_grads",
        "finalize_model_grads",
        "model_chunk.scale_gradients(scaling)",
        "÷ K, the sum of the reported counts",
    ),
)
"""(module, function, quoted text, what happens there), in the order of a step."""

CHAIN = r"""
$$
\begin{aligned}
G &= \frac{1}{K} \sum_{d,m,c} \frac{\partial}{\partial\theta}
     \Big[ \frac{D}{B} \sum_s a_{s,d,m}\, \mu_s \cdot \frac{T}{D} \Big] && \text{what runs} \\
  &= \frac{T}{K B} \sum_{d,m,c} \sum_s a_{s,d,m}\, \frac{\partial \mu_s}{\partial\theta}\Big|_c
     && \text{linear, } D \text{ cancels} \\
  &= \frac{T}{K B} \sum_s \sum_{d,m} a_{s,d,m} \sum_i \sum_c p_{c,s,i}\, g_{s,i}\, \dot x_{s,i}
     && \text{a rank differentiates its own rows} \\
  &= \frac{T}{K} \cdot \frac{1}{B} \sum_s \sum_i g_{s,i}\, \dot x_{s,i}
   = \frac{T}{K}\, \frac{\partial J}{\partial\theta}
     && \text{one owner a row, one micro-batch a sequence}
\end{aligned}
$$
"""


QUESTION = """\
## Does a sequence mean survive context parallelism?

**Question.** Megatron shards every sequence over context-parallel (CP) ranks and, with
`calculate_per_token_loss=True`, divides gradients by a token count. Does `seq-mean-token-mean` keep
its meaning?"""

ANSWER = """\
**Answer.** Yes. The gradient's direction is exact, for every batch, length, mask and topology: each
rank sees the whole sequence and its full mask, and differentiates its own rows. Removing verl
0.9.0's guard was right. One factor is left, and it is not about sequence means, it is the same in
every aggregation mode: Megatron divides by K = C Σ ⌊t/C⌋ where T = Σ t was multiplied in, so that
the gradient is T/K times as large as it should be. Reporting ⌊t/C⌋ + [c < t mod C] on CP rank c
makes K = T.

B sequences, D replicas, C CP ranks; t routed tokens of a micro-batch; μ the mean loss of a
sequence; a and p are 0 or 1: which micro-batch a sequence lies in, which rank owns a row."""


def text(root: Path) -> str:
    """The whole text, shorter than `LIMIT`. `root` is the repository, with `evidence/`.

    `ValueError` for a text that is too long, or a quoted line that the installed release lacks.
    """
    register = claims.load(root)
    records = [load(path) for path in sorted(Path(root, "evidence").glob("engine-*.json"))]
    parts = (
        QUESTION,
        ANSWER,
        CHAIN,
        "**The code of each factor**\n\n" + "\n".join(_steps()),
        "**What stands behind it**\n\n" + "\n".join(_known(register)),
        "**Runs of verl's whole engine**\n\n" + "\n".join(_runs(records)),
        "**Check it in one minute**, on a CPU, with torch and verl alone:\n\n" + _script(),
        "**Open**\n\n" + "\n".join(_open(register)),
        _details("Every topology that ran, with its largest error", _topologies(records)),
    )
    found = "\n\n".join(part.strip() for part in parts) + "\n"
    if len(found) >= LIMIT:
        raise ValueError(f"the text has {len(found)} characters, allowed are fewer than {LIMIT}")
    return found


def repository() -> Path:
    """The checkout that this package was installed from. `ValueError` without one."""
    root = Path(__file__).parents[2]
    if not any(root.glob("evidence/engine-*.json")):
        raise ValueError("the walkthrough needs the repository: evidence is not beside src")
    return root


def _steps():
    for number, (*where, what) in enumerate(STEPS, 1):
        name = where[1].removeprefix("MegatronEngineWithLMHead.")
        yield f"{number}. {what} ([`{name}`]({link(*where)}))"


def _known(register):
    """A row for each statement that is not open, with how much evidence `claims.yml` names."""
    yield "| statement | says that | status | derived in | run and tested by |"
    yield "|---|---|---|---|---|"
    for label, entry in register.items():
        if entry["status"] != "open":
            notebooks = dict.fromkeys(r.partition("#")[0] for r in entry.get("derivation", []))
            derived = ", ".join(f"`{name}`" for name in notebooks)
            counted = (len(entry.get("checks", [])), "cell"), (len(entry.get("tests", [])), "test")
            counts = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counted)
            cells = (label, entry["title"], entry["status"], derived, counts)
            yield "| " + " | ".join(cells) + " |"


def _open(register):
    for label, entry in register.items():
        if entry["status"] == "open":
            reason = " ".join(entry["reason"].split())
            yield f"- *{label}*, {entry['title']}: {reason}"


def _runs(records: list[Evidence]):
    """A row for each record of the sweep: what ran, and the largest error of an exact run."""
    yield "| date | torch | verl | Megatron-Core | cases | largest error, float64 | of T/K |"
    yield "|---|---|---|---|---|---|---|"
    for record in records:
        versions = record.provenance["versions"]
        exact = [one for one in record.records if one.exact and not one.message]
        cells = (
            record.provenance["date"],
            *(versions[name] for name in ("torch", "verl", "megatron-core")),
            record.cases,
            f"{max(one.residual for one in exact):.0e}",
            f"{max(one.ratio_error for one in exact):.0e}",
        )
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    yield (
        "The error is of the largest entry of the gradient, over all parameters, against a "
        "transformer and a loss in plain torch; in these runs Megatron's own float32 steps are "
        "replaced by float64."
    )


def _topologies(records: list[Evidence]):
    """A row for each topology: runs and largest error over releases, models and regimes."""
    found = {}
    for one in (one for record in records for one in record.records):
        if one.exact and not one.message:
            case = one.case
            found.setdefault((case.dp, case.cp, case.tp, case.pp, case.vpp or 1), []).append(one)
    yield "| DP | CP | TP | PP | virtual stages | runs | largest error |"
    yield "|---|---|---|---|---|---|---|"
    for sizes, ones in sorted(found.items()):
        worst = max(one.residual for one in ones)
        yield "| " + " | ".join(map(str, (*sizes, len(ones), f"{worst:.0e}"))) + " |"


def _script():
    source = Path(__file__).with_name("one_minute.py").read_text()
    return f"```python\n{source}```"


def _details(summary, lines):
    body = "\n".join(lines)
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"
