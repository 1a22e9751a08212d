"""The committed pictures are what a run draws now."""

from pathlib import Path

import matplotlib
import pytest
from matplotlib.testing.compare import compare_images

from cpnorm import figures, mutants

matplotlib.use("agg")
COMMITTED = Path(__file__).parents[1] / "book/figures"
TOLERANCE = 1  # of 255, root mean square: antialiasing


@pytest.fixture
def difference(tmp_path):
    def compare(picture):
        figures.draw(tmp_path)
        return compare_images(COMMITTED / picture.name, tmp_path / picture.name, TOLERANCE)

    return compare


@pytest.mark.parametrize("picture", COMMITTED.glob("*.png"), ids=lambda path: path.stem)
def test_pictures_are_up_to_date(picture, difference):
    assert difference(picture) is None


def test_a_picture_of_another_run_is_seen(difference):
    with mutants.changed_sign():
        assert difference(COMMITTED / "shares.png") is not None
