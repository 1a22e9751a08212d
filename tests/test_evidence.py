"""A file of evidence comes back as it was, and the committed one says what the book says of it."""

import json
import os
import platform
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cpnorm import case, evidence, sources
from cpnorm.case import Case, Sequence
from cpnorm.engine import sweep
from cpnorm.evidence import Record, load, provenance, save
from cpnorm.transformer import Model

COMMITTED = sorted((Path(__file__).parents[1] / "evidence").glob("engine-mcore-*.json"))
REFUSED = ("layout is 'contiguous', allowed is zigzag",)

CASE = Case(sequences=(Sequence(1, 2, (0, 1)), Sequence(2, 2)), cp=2, kl_coef=1e-5)
NUMBERS = {"predicted": 8 / 7, "ratio": 1 / 3, "residual": 1e-16, "loss_error": 0.0}
RECORDS = [
    Record(case=CASE, model=Model(), exact=True, T=8, K=7, worst="w", seconds=0.5, **NUMBERS),
    Record(case=replace(CASE, pp=2, vpp=2), model=Model(experts=4), exact=False, message="no"),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "new" / "some.json"
    save(path, "engine", RECORDS, cases=2)
    return path


@pytest.fixture(scope="module", params=COMMITTED, ids=lambda path: path.stem)
def committed(request):
    return load(request.param)


def test_round_trip(path):
    found = load(path)
    assert (found.kind, found.measured) == ("engine", {"cases": 2})
    assert found.provenance == provenance()
    assert sorted(found.records, key=repr) == sorted(RECORDS, key=repr)


@pytest.mark.parametrize("records", [[], RECORDS[:1]])
def test_round_trip_of_few(tmp_path, records):
    save(tmp_path / "few.json", "engine", records)
    assert list(load(tmp_path / "few.json").records) == records


def test_order_of_records_does_not_matter(path, tmp_path):
    save(tmp_path / "other.json", "engine", RECORDS[::-1], cases=2)
    assert (tmp_path / "other.json").read_text() == path.read_text()


def test_a_run_that_ends_early_leaves_the_old_file(path):
    old = path.read_text()
    with pytest.raises(ValueError, match="JSON compliant"):
        save(path, "engine", [replace(RECORDS[0], residual=float("nan"))])
    assert path.read_text() == old
    assert os.listdir(path.parent) == [path.name]


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json is missing: `make evidence` writes it$"):
        load(tmp_path / "none.json")


def records_of(file):
    return file["records"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.pop("provenance"), "it has no 'provenance'"),
        (lambda file: file.update(records=3), "'int' object is not iterable"),
        (lambda file: file["common"]["case"].pop("sequences"), "it has no 'sequences'"),
        (lambda file: records_of(file)["case"].update(dp=0), "dp is 0, allowed is an integer"),
        (lambda file: records_of(file).update(more=1), "unexpected keyword argument 'more'"),
        (lambda file: records_of(file).update(reference="me"), "reference is 'me', allowed is"),
        (lambda file: [r.update(ratio=None, message=None) for r in file["records"]], "neither"),
    ],
)
def test_broken_file(path, change, said):
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ValueError, match=re.escape("some.json is not a file of evidence: ")) as e:
        load(path)
    assert said in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", "3"])
def test_what_is_no_evidence(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some\.json is not a file of evidence: "):
        load(path)


def test_provenance_names_no_machine():
    found = provenance()
    assert list(found) == ["date", "python", "versions", "system", "machine", "cpus"]
    assert set(found["versions"]) == set(evidence.PACKAGES)
    text = json.dumps(found)
    for private in (socket.gethostname(), platform.node(), str(Path.home()), os.getcwd(), "/"):
        assert private not in text


# The committed file

EVERY = sorted((Path(__file__).parents[1] / "evidence").glob("*.json"))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_it_loads_where_verl_is_not_installed(monkeypatch, path):
    def missing(package):
        raise ValueError(f"{package} is not installed")

    monkeypatch.setattr(sources, "_folders", missing)
    for name in ("parsed", "losses", "modes"):
        monkeypatch.setattr(case, name, missing)
    assert load(path).records


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_it_loads_where_verl_lacks_a_loss_and_a_mode(monkeypatch, path):
    monkeypatch.setattr(case, "losses", lambda: ("vanilla",))
    monkeypatch.setattr(case, "modes", lambda: ("token-mean",))
    cases = [record.case for record in load(path).records]
    first = next(one for one in cases if one.loss == "gspo")
    with pytest.raises(ValueError, match="loss is 'gspo', allowed is one of vanilla"):
        case.check_runs(first)
    with pytest.raises(ValueError, match="allowed is one of token-mean"):
        case.check_runs(replace(first, loss="vanilla"))


def test_committed_file_holds_the_whole_sweep(committed):
    jobs = {(r.case, r.model, r.exact) for r in committed.records}
    missing = set(map(tuple, sweep.cases())) - jobs
    assert not missing
    assert committed.measured["cases"] == len(sweep.cases())


def test_committed_file_has_only_the_expected_refusals(committed):
    for message in {r.message for r in committed.records if r.message}:
        assert message.startswith(REFUSED), message


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_file_names_no_path(path):
    assert not re.search(r"/(home|root|tmp|work|usr|Users)\b", path.read_text())


def test_committed_files_are_named_by_their_megatron():
    assert COMMITTED
    for path in COMMITTED:
        version = load(path).provenance["versions"]["megatron-core"]
        assert path.stem == f"engine-mcore-{version}"


def test_exact_runs_agree_to_float64(committed):
    exact = [r for r in committed.records if r.exact and not r.message]
    assert max(r.residual for r in exact) <= 1e-13
    assert max(r.ratio_error for r in exact) <= 1e-13
    assert max(r.loss_error for r in exact) <= 1e-12


def test_same_float32_steps_give_the_same_gradient(committed):
    """At TP 1 the engine takes the same float32 steps as without sharding, but for 1/K."""
    own = [r for r in committed.records if r.reference == "engine" and not r.exact]
    own = [r for r in own if not r.message and r.case.tp == 1]
    assert max(r.residual for r in own) <= 1e-13
    assert max(r.loss_error for r in own) <= 1e-12
    assert max(r.ratio_error for r in own) <= 2**-23
    averaging = [r for r in own if r.case.regime == "averaging"]
    assert max(r.ratio_error for r in averaging) <= 1e-12


def test_launch_per_case_is_dear(committed):
    assert committed.measured["launch"]["ratio"] >= 40
