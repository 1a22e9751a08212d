"""Every fault is seen by the check that must see it, and sound code passes."""

import pytest

from cpnorm import check, mutants
from cpnorm.mutants import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    fault, agrees = MUTANTS[name]
    assert agrees()
    with fault():
        assert not agrees()
    assert agrees()


def test_a_wrong_partition_does_not_change_the_gradient():
    with mutants.swapped_chunk():
        assert mutants.ranks_agree()


def test_the_gradient_alone_shows_local_means():
    with mutants.local_means():
        record = check.check(mutants.CASE)
    assert record.gradient_error > 0.1
    assert record.off_shard == 0
