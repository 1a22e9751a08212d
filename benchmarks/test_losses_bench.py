"""How long the loss check takes. `make bench`; the number in brackets is the ratio in a group."""

import pytest
import torch

from cpnorm.case import Case, Sequence
from cpnorm.check import check, unsharded
from cpnorm.sweep import full_sweep, sweep

ONE_OF_EACH = [c for c in full_sweep() if c.clip and not c.rollout_weights and c.cp == 8]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of_size(tokens, cp):
    """A case of 8 sequences on 2 replicas, 4 micro-batches each, with `tokens` routed tokens."""
    prompt = tokens // 80
    seqs = tuple(Sequence(prompt, tokens // 8 - prompt) for _ in range(8))
    return Case(sequences=seqs, dp=2, cp=cp, loss="gspo", clip_low=0.05, clip_high=0.1)


@pytest.mark.benchmark(group="every loss and mode at CP 8")
def test_checks_per_second(benchmark, capsys):
    records = benchmark.pedantic(sweep, (ONE_OF_EACH,), rounds=3, warmup_rounds=1)
    assert all(r.passed for r in records)
    rate = sum(r.ranks for r in records) / benchmark.stats.stats.mean
    benchmark.extra_info["rank checks per second"] = round(rate)
    with capsys.disabled():
        print(f"\n{len(records)} cases at CP 8: {rate:.0f} rank checks per second")


@pytest.mark.benchmark(group="tokens, GSPO at CP 2")
@pytest.mark.parametrize("tokens", [1_000, 10_000, 100_000, 1_000_000])
def test_against_tokens(benchmark, tokens):
    _measure(benchmark, of_size(tokens, 2))


@pytest.mark.benchmark(group="CP, GSPO with 16 000 tokens")
@pytest.mark.parametrize("cp", [1, 2, 4, 8, 16, 32, 64, 128])
def test_against_cp(benchmark, cp):
    _measure(benchmark, of_size(16_000, cp))


def _measure(benchmark, case):
    reference = unsharded(case)
    record = benchmark.pedantic(check, (case, reference), rounds=3, warmup_rounds=1)
    assert record.passed
