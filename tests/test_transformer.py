"""The tiny transformer: against Megatron's GPTModel, finite differences, and by its properties."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpnorm import oracle, precision, transformer
from cpnorm.batch import batch
from cpnorm.case import Case, Sequence, modes
from cpnorm.engine.float64 import float64
from cpnorm.losses import (
    actor_config,
    columns,
    full_loss,
    micro_batch,
    policy_loss,
    row_index,
)
from cpnorm.transformer import Model

DENSE, MOE = Model(), Model(experts=4)
MODELS = pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
SEQUENCES = (Sequence(3, 5), Sequence(4, 9, (1, 1, 1, 0, 0, 1, 1, 0, 1)), Sequence(1, 1))
CASE = Case(sequences=SEQUENCES, clip_low=0.05, clip_high=0.1, seed=1)
KEPT = 1e-13  # float64 on both sides: sums of at most 128 terms, in another order
ROUNDED = 3e-6  # a float32 step: 2^-24 for each of a few values of size up to 10


def ids_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (length,), generator=generator)


@pytest.fixture(scope="module")
def megatron():
    """Builds Megatron's `GPTModel` of a `Model` and a seed, in a world of this one process."""
    with precision.alone():
        yield _gpt


def _gpt(model, seed=0):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from cpnorm.engine.model import transformer_config

    gpt = GPTModel(
        transformer_config(CASE, model),
        get_gpt_layer_local_spec(num_experts=model.experts, normalization="RMSNorm"),
        vocab_size=model.vocab,
        max_sequence_length=256,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).double()
    full = transformer.weights(model, seed)
    for name, parameter in gpt.named_parameters():
        parameter.data.copy_(full[name])
    return gpt


def megatron_logits(gpt, ids):
    """Logits `(n, vocab)` of one sequence; True in the mask is what attention must not see."""
    later = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).triu(1)
    return gpt(input_ids=ids[None], position_ids=None, attention_mask=later)[0]


SIZES = pytest.mark.parametrize(
    "model",
    [
        DENSE,
        MOE,
        Model(layers=1, hidden=48, heads=6, groups=6, ffn=20, vocab=10),
        Model(layers=3, hidden=16, heads=4, groups=1, ffn=8, vocab=33, experts=6, topk=3),
    ],
    ids=["dense", "moe", "one group a head", "one group"],
)


@SIZES
def test_names_and_shapes_are_megatrons(megatron, model):
    theirs = {name: tuple(p.shape) for name, p in megatron(model).named_parameters()}
    assert theirs == model.shapes()
    assert list(theirs) == list(transformer.weights(model, 0))


@SIZES
def test_logits_and_gradients_are_megatrons(megatron, model):
    for seed, n in enumerate((1, 2, 7, 50)):
        gpt, w = megatron(model, seed), transformer.weights(model, seed)
        w = {name: value.requires_grad_() for name, value in w.items()}
        ids = ids_of(n, seed) % model.vocab
        with float64():
            theirs = megatron_logits(gpt, ids)
            cotangent = torch.randn(theirs.shape, dtype=torch.float64)
            theirs.backward(cotangent)
        ours = transformer.logits(model, w, ids)
        assert ours.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=0, atol=KEPT)
        gradients = torch.autograd.grad(ours, list(w.values()), cotangent)
        largest = max(float(g.abs().max()) for g in gradients)
        for (name, p), g in zip(gpt.named_parameters(), gradients, strict=True):
            error = float((p.grad - g).abs().max()) if p.grad is not None else float(g.abs().max())
            assert error <= KEPT * largest, name


def test_the_routers_float32_softmax_is_all_of_the_difference(megatron):
    gpt, w, ids = megatron(MOE), transformer.weights(MOE, 0), ids_of(50)
    ours = transformer.logits(MOE, w, ids)
    as_is = (megatron_logits(gpt, ids) - ours).abs().max()
    assert 1e-9 < as_is < ROUNDED
    with float64():
        assert (megatron_logits(gpt, ids) - ours).abs().max() < KEPT


def test_verls_log_probs_and_entropies(megatron):
    """verl's own functions on our logits, one rank. Megatron's cross entropy is float32."""
    from verl.utils.megatron.tensor_parallel import (
        vocab_parallel_entropy,
        vocab_parallel_log_probs_from_logits,
    )

    w, ids = transformer.weights(DENSE, 0), ids_of(20)
    logits = transformer.logits(DENSE, w, ids)
    log_probs = vocab_parallel_log_probs_from_logits(logits.clone(), ids.roll(-1))
    rows = transformer.log_softmax(DENSE, w, [ids])
    ours = transformer.log_probs(rows, [ids])[0]
    assert float((log_probs - ours).abs().max()) < ROUNDED
    entropy = transformer.entropies(rows)[0]
    torch.testing.assert_close(vocab_parallel_entropy(logits.clone()), entropy, rtol=0, atol=KEPT)


@pytest.mark.parametrize("lengths", [(7,), (3, 6, 1, 5)])
def test_labels_are_verls_where_a_loss_reads_them(megatron, lengths):
    from verl.models.mcore.util import preprocess_thd_engine

    ids = [ids_of(n, n) for n in lengths]
    nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    labels = preprocess_thd_engine(nested, need_roll=True)[0][0].split(lengths)
    for theirs, x in zip(labels, ids, strict=True):
        assert torch.equal(theirs[:-1], x.roll(-1)[:-1])
    if len(lengths) == 1:
        assert torch.equal(labels[0], ids[0].roll(-1))


def test_no_loss_reads_the_last_row():
    prompts, responses = (3, 1, 4), (5, 1, 2)
    last = torch.tensor([p + r for p, r in zip(prompts, responses, strict=True)]).cumsum(0)
    assert not torch.isin(row_index(prompts, responses), last).any()


def test_attention_row_by_row():
    """Head by head, the rotation as a complex product. Its angles are exact, ours float32."""
    model = Model(hidden=48, heads=6, groups=2)
    w, n, c = transformer.weights(model, 3), 6, model.channels
    one = {k.removeprefix("decoder.layers.0."): v for k, v in w.items()}
    x = torch.randn(n, model.hidden, dtype=torch.float64)
    expected = torch.zeros(n, model.hidden, dtype=torch.float64)
    share = model.heads // model.groups
    blocks = (x @ one["self_attention.linear_qkv.weight"].T).split(c, dim=1)

    def turned(v, position):
        steps = [10000 ** (-2 * j / c) for j in range(c // 2)]
        turn = torch.tensor(
            [complex(math.cos(position * s), math.sin(position * s)) for s in steps]
        )
        z = torch.complex(v[: c // 2], v[c // 2 :]) * turn
        return torch.cat((z.real, z.imag))

    for h in range(model.heads):
        first = h // share * (share + 2)
        query, key, value = (blocks[first + k] for k in (h % share, share, share + 1))
        for i in range(n):
            scores = [turned(query[i], i) @ turned(key[j], j) / c**0.5 for j in range(i + 1)]
            shares = torch.stack(scores).softmax(0)
            expected[i, h * c : (h + 1) * c] = shares @ value[: i + 1]
    expected = expected @ one["self_attention.linear_proj.weight"].T
    ours = transformer.attention(model, one, x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=ROUNDED)


@MODELS
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_sequences_do_not_meet(model, lengths, seed):
    w, ids = transformer.weights(model, 0), [ids_of(n, seed + i) for i, n in enumerate(lengths)]
    together = transformer.log_softmax(model, w, ids)
    assert [len(row) for row in together] == lengths
    for row, x in zip(together, ids, strict=True):
        assert torch.equal(row, transformer.log_softmax(model, w, [x])[0])


@MODELS
@given(data=st.data(), n=st.integers(2, 24))
@settings(max_examples=25)
def test_a_later_token_never_changes_an_earlier_row(model, data, n):
    w, ids = transformer.weights(model, 0), ids_of(n)
    at = data.draw(st.integers(1, n - 1))
    other = ids.clone()
    other[at] = (other[at] + data.draw(st.integers(1, 63))) % 64
    one, two = (transformer.log_softmax(model, w, [x]) for x in (ids, other))
    entropies = [transformer.entropies(rows)[0] for rows in (one, two)]
    labelled = [transformer.log_probs(r, [x])[0] for r, x in ((one, ids), (two, other))]
    for (one, two), first in ((entropies, at), (labelled, at - 1)):
        torch.testing.assert_close(one[:first], two[:first], rtol=0, atol=KEPT)
        assert one[first] != two[first]


@MODELS
def test_probabilities_vary(model):
    w = transformer.weights(model, 0)
    ids = [ids_of(30, seed) for seed in range(10)]
    distributions = transformer.log_softmax(model, w, ids)
    rows = torch.cat(transformer.log_probs(distributions, ids))
    entropy = torch.cat(transformer.entropies(distributions))
    assert rows.std() > 1
    assert rows.max() > -2 > -8 > rows.min()
    assert 0 <= entropy.min() < 1.5 < 3 < entropy.max() <= math.log(model.vocab)
    assert math.log(model.vocab) - float(entropy.mean()) > 1


def test_routers_choose_clearly():
    """The last chosen expert and the first that is not differ by far more than rounding."""
    gaps, forward = [], transformer.feed_forward

    def watched(model, w, x):
        chosen = (x @ w["mlp.router.weight"].T).sort(descending=True).values
        gaps.append(chosen[:, model.topk - 1] - chosen[:, model.topk])
        return forward(model, w, x)

    with mock.patch.object(transformer, "feed_forward", watched):
        for seed in range(10):
            transformer.logits(MOE, transformer.weights(MOE, seed), ids_of(30, seed))
    gaps = torch.cat(gaps)
    assert len(gaps) == 600
    assert gaps.min() > 1e-5
    assert gaps.median() > 0.3


def test_weights_depend_on_seed_name_and_shape_only():
    small, large = transformer.weights(Model(layers=1), 5), transformer.weights(Model(layers=3), 5)
    assert all(torch.equal(value, large[name]) for name, value in small.items())
    experts = transformer.weights(MOE, 5)
    shared = experts.keys() & large.keys()
    assert len(shared) == 11
    assert all(torch.equal(experts[name], large[name]) for name in shared)
    name, other = "output_layer.weight", "embedding.word_embeddings.weight"
    assert not torch.allclose(small[name] / small[name].std(), small[other] / small[other].std())
    assert not torch.equal(small[name], transformer.weights(Model(layers=1), 6)[name])
    rounded = transformer.weights(Model(layers=1), 5, torch.float32)
    assert all(torch.equal(rounded[name], value.float()) for name, value in small.items())


def test_token_ids_belong_to_lengths_and_seed():
    ids = transformer.token_ids(CASE, DENSE)
    assert [len(x) for x in ids] == [8, 13, 2]
    other = replace(CASE, dp=3, cp=4, loss="vanilla", dtype="float32")
    again = transformer.token_ids(other, MOE)
    assert all(torch.equal(x, y) for x, y in zip(ids, again, strict=True))
    moved = transformer.token_ids(replace(CASE, seed=2), DENSE)
    assert not torch.equal(torch.cat(ids), torch.cat(moved))
    few = transformer.token_ids(CASE, replace(DENSE, vocab=3))
    assert set(torch.cat(few).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers is 0, allowed is an integer, 1 or more"),
        ({"vocab": 2.0}, "vocab is 2.0, allowed is an integer, 1 or more"),
        ({"ffn": True}, "ffn is True, allowed is an integer, 1 or more"),
        ({"experts": "4"}, "experts is '4', allowed is an integer, 1 or more"),
        ({"hidden": 36}, "hidden is 36, allowed is a multiple of 8, twice the heads"),
        ({"groups": 3}, "groups is 3, allowed is a divisor of the 4 heads"),
        ({"experts": 4, "topk": 1}, "topk is 1, allowed is an integer from 2 to the 4 experts"),
        ({"experts": 4, "topk": 5}, "topk is 5, allowed is an integer from 2 to the 4 experts"),
    ],
)
def test_models_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Model(**fields)


@pytest.mark.parametrize(
    "ids", [torch.zeros(0, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)]
)
def test_ids_that_are_refused(ids):
    with pytest.raises(
        ValueError, match=r"ids have shape .*, allowed is \(n,\) with n of 1 or more"
    ):
        transformer.logits(DENSE, transformer.weights(DENSE, 0), ids)


# The oracle on the transformer


def test_a_batch_around_given_rows():
    rows, entropy = oracle.model_outputs(CASE, DENSE, transformer.weights(DENSE, CASE.seed))
    drawn, given_ = batch(CASE), batch(CASE, rows, entropy)
    assert torch.equal(given_.rows, rows)
    assert torch.equal(given_.entropy, entropy)
    for name in ("advantages", "weights", "mask"):
        assert torch.equal(getattr(given_, name), getattr(drawn, name))
    start = 0
    for s, seq in enumerate(CASE.sequences):
        new = rows[start + seq.prompt - 1 : start + seq.length - 1]
        was = drawn.rows[start + seq.prompt - 1 : start + seq.length - 1]
        for table, other in ((given_.old, drawn.old), (given_.ref, drawn.ref)):
            noise, expected = table[s, : seq.response] - new, other[s, : seq.response] - was
            free = other[s, : seq.response] < -0.01
            torch.testing.assert_close(noise[free], expected[free], rtol=0, atol=1e-14)
            assert (table[s, seq.response :] == 0).all()
        start += seq.length
    low = replace(CASE, dtype="float32")
    constants = vars(batch(low, rows.requires_grad_(), entropy.requires_grad_())).values()
    assert {x.dtype for x in constants} == {torch.float32, torch.bool}
    assert not any(x.requires_grad for x in constants)


@pytest.mark.parametrize("name", ["rows", "entropy"])
def test_a_batch_around_too_few_rows(name):
    with pytest.raises(ValueError, match=rf"^{name} has shape \(3,\), allowed is \(23,\)$"):
        batch(CASE, **{name: torch.zeros(3)})


@MODELS
@pytest.mark.parametrize("kl", oracle.KL)
def test_gradient_by_finite_differences(model, kl):
    """PPO's J is differentiable but where clipping sets in, which no row here comes near.

    GSPO's gradient is not the slope of its J: it stops some gradients.
    """
    case = replace(CASE, loss="vanilla", kl_coef=0.3, entropy_coef=0.1)
    J, gradient = oracle.gradient(case, model, kl=kl)
    w = transformer.weights(model, case.seed)
    data = batch(case, *oracle.model_outputs(case, model, w))

    def value(name, change):
        rows, entropy = oracle.model_outputs(case, model, w | {name: w[name] + change})
        return float(oracle.total(case, data, rows, entropy, kl=kl))

    assert list(gradient) == list(w)
    for name, x in w.items():
        unit = torch.randn(x.shape, generator=transformer.generator(0, name), dtype=torch.float64)
        step = 1e-5 * unit / unit.norm()
        slope = (value(name, step) - value(name, -step)) / 2e-5
        expected = float((gradient[name] * unit).sum() / unit.norm())
        assert slope == pytest.approx(expected, rel=1e-6, abs=1e-9), name
    assert float(J) == value("output_layer.weight", 0)


@MODELS
@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("loss", ["gspo", "vanilla", "sapo"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_is_that_of_verls_whole_loss(model, mode, loss, weighted):
    case = replace(
        CASE,
        loss=loss,
        mode=mode,
        rollout_weights=weighted,
        kl_coef=0.3,
        entropy_coef=0.1,
        loss_scale_factor=7,
        micro_batch_size=3,
    )
    w = {k: v.requires_grad_() for k, v in transformer.weights(model, case.seed).items()}
    outputs = oracle.model_outputs(case, model, w)
    micro = micro_batch(case, batch(case, *outputs), range(3))
    config = actor_config(
        case, entropy_coeff=case.entropy_coef, use_kl_loss=True, kl_loss_coef=case.kl_coef
    )

    def policy(rows):
        return policy_loss(config, micro, columns(rows, micro), micro.mask)

    expected = full_loss(config, micro, torch.stack(outputs))
    gradients = torch.autograd.grad(expected, list(w.values()))
    J, ours = oracle.gradient(case, model, None if loss in oracle.LOSSES else policy)
    assert float(J) == pytest.approx(float(expected.detach()), rel=1e-13)
    largest = max(float(g.abs().max()) for g in gradients)
    for name, theirs in zip(w, gradients, strict=True):
        assert float((ours[name] - theirs).abs().max()) <= KEPT * largest, name


def test_clipping_bites_on_the_transformer():
    case = Case(
        sequences=tuple(Sequence(2, n) for n in (9, 12, 15)),
        loss="vanilla",
        clip_low=0.05,
        clip_high=0.1,
    )
    _, clipped = oracle.gradient(case, DENSE)
    _, free = oracle.gradient(replace(case, clip=False), DENSE)
    name = "output_layer.weight"
    assert float((clipped[name] - free[name]).norm() / free[name].norm()) > 0.1


def test_a_float32_case_has_rounded_weights_and_a_float64_gradient():
    J, gradient = oracle.gradient(replace(CASE, dtype="float32"), DENSE)
    exact_J, exact = oracle.gradient(CASE, DENSE)
    assert J.dtype == torch.float64
    assert all(g.dtype == torch.float64 for g in gradient.values())
    assert 0 < abs(float(J - exact_J)) < 1e-5
    name = "output_layer.weight"
    assert 0 < float((gradient[name] - exact[name]).norm() / exact[name].norm()) < 1e-4


def test_losses_and_estimates_that_are_not_written_here():
    case = replace(CASE, loss="sapo")
    with pytest.raises(ValueError, match="loss is 'sapo', allowed in the oracle is gspo, vanilla"):
        oracle.gradient(case, DENSE)
    with pytest.raises(ValueError, match="kl is 'k2', allowed in the oracle is low_var_kl, k3, kl"):
        oracle.gradient(CASE, DENSE, kl="k2")
