"""The committed pictures are what a run draws now."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.testing.compare import compare_images

from cpnorm import mutants
from cpnorm.case import Case, Sequence
from cpnorm.evidence import Record
from cpnorm.figures import FLOOR
from cpnorm.figures.engine import SERIES, coverage
from cpnorm.figures.losses import draw
from cpnorm.transformer import Model

matplotlib.use("agg")
COMMITTED = Path(__file__).parents[1] / "book/figures"
TOLERANCE = 1  # of 255, root mean square: antialiasing


@pytest.fixture
def difference(tmp_path):
    def compare(picture):
        draw(tmp_path)
        return compare_images(COMMITTED / picture.name, tmp_path / picture.name, TOLERANCE)

    return compare


@pytest.mark.parametrize("picture", COMMITTED.glob("*.png"), ids=lambda path: path.stem)
def test_pictures_are_up_to_date(picture, difference):
    assert difference(picture) is None


def test_a_picture_of_another_run_is_seen(difference):
    with mutants.changed_sign():
        assert difference(COMMITTED / "shares.png") is not None


def record(dp, cp, exact, residual=None, message=None, **sizes):
    case = Case(sequences=(Sequence(1, 2),) * 4, dp=dp, cp=cp, **sizes)
    numbers = {"predicted": 1.0, "ratio": 1.0, "residual": residual, "loss_error": 0.0}
    numbers = numbers | {"seconds": 1.0} if message is None else {"message": message}
    return Record(case=case, model=Model(), exact=exact, **numbers)


ENGINE_RECORDS = [
    record(1, 2, True, 1e-15),
    record(1, 2, True, 1e-14),
    record(2, 1, True, 0.0, tp=2),
    record(2, 1, False, 1e-7),
    record(1, 2, False, message="it failed"),
    record(1, 2, True, message="refused", layout="contiguous"),
]


def test_coverage_shows_the_largest_residual_and_what_is_missing():
    figure = coverage(ENGINE_RECORDS)
    panels = figure.axes[: len(SERIES)]
    exact, plain, own = (np.ma.filled(p.images[0].get_array(), np.nan) for p in panels)
    np.testing.assert_allclose(exact, [[np.nan, -14.0], [FLOOR, np.nan]])
    np.testing.assert_allclose(plain, [[-7.0, np.nan], [np.nan, np.nan]])
    assert np.isnan(own).all()
    crosses = [[line.get_xydata().tolist() for line in p.lines] for p in panels]
    assert crosses == [[], [[[1.0, 0.0]]], []]
    labels = [
        [t.get_text() for t in axis.get_ticklabels()] for axis in (panels[0].xaxis, panels[0].yaxis)
    ]
    assert labels == [["2×1", "1×2"], ["dense, TP 1, PP 1", "dense, TP 2, PP 1"]]
