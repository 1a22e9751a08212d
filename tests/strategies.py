"""What hypothesis draws: sequences and cases of any shape, small enough to run many."""

from hypothesis import strategies as st

from cpnorm.case import LAYOUTS, REGIMES, Case, Sequence, losses, modes


@st.composite
def sequences(draw, longest=12):
    response = draw(st.integers(1, longest))
    mask = st.lists(st.integers(0, 1), min_size=response, max_size=response).map(tuple)
    return Sequence(draw(st.integers(1, longest)), response, draw(st.none() | mask))


@st.composite
def cases(draw, names=None, dtypes=("float64", "float32"), **fixed):
    """Cases with at least one counted token; `fixed` are fields that are not drawn."""
    dp, micro_batch_size, M = (draw(st.integers(1, 3)) for _ in range(3))
    seqs = draw(
        st.lists(
            sequences(), min_size=dp * micro_batch_size * M, max_size=dp * micro_batch_size * M
        ).filter(lambda seqs: any(s.n for s in seqs))
    )
    drawn = {
        "sequences": seqs,
        "dp": dp,
        "cp": draw(st.integers(1, 9)),
        "tp": draw(st.integers(1, 3)),
        "pp": draw(st.integers(1, 2)),
        "micro_batch_size": micro_batch_size,
        "loss": draw(st.sampled_from(names or losses())),
        "mode": draw(st.sampled_from(modes())),
        "clip": draw(st.booleans()),
        "clip_low": draw(st.sampled_from((0.0003, 0.05, 0.2))),
        "clip_high": draw(st.sampled_from((0.0004, 0.1, 0.28))),
        "loss_scale_factor": draw(st.none() | st.integers(1, 100)),
        "rollout_weights": draw(st.booleans()),
        "regime": draw(st.sampled_from(REGIMES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "dtype": draw(st.sampled_from(dtypes)),
        "seed": draw(st.integers(0, 2**32)),
    }
    return Case(**drawn | fixed)
