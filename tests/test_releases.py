"""Other releases of verl: which are there, and what a process of theirs may go wrong in.

What each makes of a case, and its guard, is run by the notebook.
"""

import importlib.metadata
import json
import time
from pathlib import Path

import pytest
import torch

from cpnorm import releases
from cpnorm.case import Case, Sequence
from cpnorm.releases import BESIDE, INSTALLED
from cpnorm.vectors import angle, flat, multiple

ROOT = Path(__file__).parents[1]
EXACT = 1e-13  # as in test_engine.py


def test_a_process_that_sees_another_release_ends(monkeypatch):
    monkeypatch.setattr(releases, "_in_front", lambda release: [])
    with pytest.raises(RuntimeError, match=f"^verl 0.8.0: .*the process sees {INSTALLED}$"):
        releases.run("0.8.0", (releases.critics_mode,))


def test_unknown_release_names_those_allowed():
    allowed = "release is '0.7.1', allowed is one of 0.8.0, 0.9.0, 0.9.1"
    with pytest.raises(ValueError, match=allowed):
        releases.run("0.7.1", (json.loads, "1"))


def test_release_that_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"verl 0.9.0 is not set up: run `make setup`"):
        releases.run("0.9.0", (json.loads, "1"))


def test_another_release_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2")
    with pytest.raises(FileNotFoundError, match=r"verl 0.9.2 is installed, not 0.9.1: run"):
        releases.run(INSTALLED, (json.loads, "1"))


def test_an_error_in_the_process_is_one_sentence():
    with pytest.raises(RuntimeError) as error:
        releases.run("0.8.0", (importlib.metadata.version, "no-such-package"))
    (sentence,) = str(error.value).splitlines()
    assert sentence.startswith("verl 0.8.0: ")
    assert "no-such-package" in sentence


def test_a_process_that_takes_too_long():
    with pytest.raises(RuntimeError, match=r"verl 0.8.0 did not finish in 0.2 s"):
        releases.run("0.8.0", (time.sleep, 60), timeout=0.2)


def test_releases_are_those_that_are_set_up():
    def pinned(name):
        lines = (ROOT / name).read_text().splitlines()
        return tuple(line[6:] for line in lines if line.startswith("verl=="))

    assert pinned("requirements-releases.txt") == BESIDE
    assert pinned("requirements.txt") == (INSTALLED,)


def test_value_and_sapo_losses_are_verls():
    from verl.trainer.ppo.core_algos import compute_value_loss, get_policy_loss_fn

    from cpnorm.losses import actor_config

    draw = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 1, 12, generator=draw, dtype=torch.float64)
    mask = torch.ones(1, 12, dtype=torch.bool)
    case = Case(sequences=(Sequence(1, 12),), loss="sapo")
    theirs = compute_value_loss(new, advantages, old, mask, releases.CLIP_VALUE)[0]
    ours = releases.value(new[0], old[0], advantages[0], case).mean()
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=0)
    config, loss = actor_config(case), get_policy_loss_fn("sapo")
    theirs = loss(old, new, advantages, mask, config=config)[0]
    ours = releases.sapo(new[0], old[0], advantages[0], case).mean()
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=0)


def test_multiple_and_angle():
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert multiple(2 * a, a) == (2.0, 0.0)
    assert angle(a, 5 * a) == 0
    right = torch.tensor([-4.0, 3.0], dtype=torch.float64)
    assert angle(a, right) == pytest.approx(90)
    assert multiple(a + right, a) == pytest.approx((1, 4 / 7))


def test_flat_goes_by_name():
    a, b = torch.ones(2), torch.zeros(1)
    assert flat({"b": b, "a": a}).tolist() == flat({"a": a, "b": b}).tolist() == [1, 1, 0]
