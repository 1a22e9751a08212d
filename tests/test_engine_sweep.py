"""The sweep's list of cases is complete, and a part of it runs."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from cpnorm import check, engine
from cpnorm.case import REGIMES, modes
from cpnorm.engine import sweep
from cpnorm.layout import alignment
from cpnorm.losses import registered_losses
from cpnorm.ranks import RankError

JOBS = sweep.cases()
RUN = [job for job in JOBS if job.case.layout == "zigzag"]


def sizes(case):
    return case.dp, case.cp, case.tp, case.pp, case.vpp


def test_every_topology_with_either_model_regime_and_arithmetic():
    stages = [(1, None), (2, None), (2, 2)]
    wanted = {
        ((dp, cp, tp, pp, vpp), experts, regime, exact)
        for dp, cp, tp, (pp, vpp) in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2), stages)
        if dp * cp * tp * pp <= 8
        for experts, regime, exact in itertools.product((None, 4), REGIMES, (True, False))
    }
    assert wanted <= {(sizes(c), m.experts, c.regime, exact) for c, m, exact in RUN}
    assert len(sweep.topologies()) == len({t[0] for t in wanted}) == 33


@pytest.mark.parametrize("place", [{"dp": 2, "cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}])
def test_every_loss_in_every_mode(place):
    at = [c for c, *_ in RUN if all(getattr(c, k) == v for k, v in place.items())]
    factors = {(c.loss, c.mode, c.loss_scale_factor is None) for c in at}
    norm = "seq-mean-token-sum-norm"
    for loss, mode in itertools.product(registered_losses(), modes()):
        assert (loss, mode, mode != norm) in factors
        assert mode != norm or (loss, mode, True) in factors


def test_dynamic_micro_batches_and_further_terms():
    for wanted in (lambda c: c.max_token_len, lambda c: c.kl_coef and c.entropy_coef):
        found = [(c, m) for c, m, _ in RUN if wanted(c)]
        assert {(m.experts, c.regime) for c, m in found} == {
            (experts, regime) for experts in (None, 4) for regime in REGIMES
        }
        for field in ("dp", "cp", "tp", "pp"):
            assert max(getattr(c, field) for c, _ in found) > 1


def test_no_case_twice_and_all_fit():
    assert max(Counter(JOBS).values()) == 1
    for job in RUN:
        engine.check_fit(job.case, job.model)
    for job in set(JOBS) - set(RUN):
        assert job.case.layout == "contiguous"


def test_what_the_mini_batch_contains():
    for case, *_ in RUN:
        align = alignment(case.cp, case.tp)
        assert align == 1 or any(s.length % align for s in case.sequences)
        assert 0 in case.n
        assert any(0 < s.n < s.response for s in case.sequences)
        if case.max_token_len is None:
            assert case.M > 1
            assert len({t for replica in case.t for t in replica}) > 1
            assert case.D == 1 or len({sum(replica) for replica in case.t}) > 1
    chunk = {s.length // 4 for s in sweep.SEQUENCES if s.prompt > s.length // 4 > 0}
    assert chunk  # a prompt ends behind the first of CP 2's four chunks


def test_no_covariance_is_tied():
    for case, *_ in RUN:
        if case.loss == "kl_cov":
            for part in itertools.chain(*case.micro_batches()):
                assert sum(case.n[s] for s in part) != 2


def test_worlds_are_started_once_a_size():
    assert [size for size, _ in itertools.groupby(job.size for job in JOBS)] == [1, 2, 4, 8]


def test_additive_is_what_the_check_measures():
    for loss, additive in (("sapo", True), ("geo_mean", False)):
        job = next(j for j in RUN if j.case.loss == loss and j.case.pp == 2)
        assert sweep.additive(job.case) == additive
        reference = sweep.unsharded(job).case
        assert sizes(reference) == (job.case.dp if not additive else 1, 1, 1, 1, None)
        plain = replace(job.case, cp=1, pp=1)
        assert check.unsharded(plain).additive == additive


def test_records_of_a_part(monkeypatch):
    """One case that agrees, in float64 and not, one that is refused, and one that fails."""
    good, plain = (
        next(j for j in RUN if sizes(j.case) == (1, 2, 1, 1, None) and j.exact == exact)
        for exact in (True, False)
    )
    refused = next(j for j in JOBS if j not in RUN)
    failing = plain._replace(case=replace(plain.case, seed=7))
    run = engine.run

    def failing_run(world, case, model, exact):
        if case.seed == 7 and case.cp == 2:
            world.close()
            raise RankError(1, "case", "raised ValueError", "Traceback\n  File x\nValueError: 7")
        return run(world, case, model, exact)

    monkeypatch.setattr(engine, "run", failing_run)
    records = sweep.run([failing, refused, plain, good])
    assert [(r.case.seed, r.exact, r.reference, r.message is None) for r in records] == [
        (7, False, "oracle", False),
        (0, True, "oracle", False),
        (0, False, "oracle", True),
        (0, False, "engine", True),
        (0, True, "oracle", True),
    ]
    assert records[0].message == "rank 1 raised ValueError: ValueError: 7"
    assert records[1].message.startswith("layout is 'contiguous', allowed is zigzag")
    assert records[2].residual <= 1e-6
    assert records[3].residual <= 1e-13
    assert records[4].residual <= 1e-13
    assert all(record.ratio_error <= 1e-12 for record in records[4:])
