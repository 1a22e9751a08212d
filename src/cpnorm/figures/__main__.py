"""`python -m cpnorm.figures`: draw the pictures of book/figures anew."""

from pathlib import Path

from cpnorm.figures.losses import draw

draw(Path(__file__).parents[3] / "book/figures")
