"""Hypothesis draws the same cases on every machine and measures no time."""

from hypothesis import settings

settings.register_profile("cpnorm", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("cpnorm")
