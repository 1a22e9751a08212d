"""One training step, said completely: a `Case`. Letters as on the book's notation page."""

import ast
import dataclasses
import functools
import math
from dataclasses import dataclass, fields

import yaml

from cpnorm.sources import parsed

REGIMES = ("per-token", "averaging")
LAYOUTS = ("zigzag", "contiguous")
DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Sequence:
    """A sequence of `prompt + response` tokens.

    `mask` has one 0 or 1 for each response token, 0 where the token does not count (the output of
    a tool, for example); without it all count. `ValueError` for lengths below 1 or a mask that
    does not fit.
    """

    prompt: int
    response: int
    mask: tuple[int, ...] | None = None

    def __post_init__(self):
        _integer("prompt", self.prompt)
        _integer("response", self.response)
        if self.mask is None:
            return
        if not isinstance(self.mask, list | tuple):
            _refuse("mask", self.mask, "a list of 0 and 1, one for each response token")
        if any(type(m) is not int or m not in (0, 1) for m in self.mask):
            _refuse("mask", self.mask, "a list of the integers 0 and 1")
        if len(self.mask) != self.response:
            _refuse("mask", self.mask, f"a list of {self.response} entries, one a response token")
        object.__setattr__(self, "mask", tuple(self.mask))

    @property
    def counted(self) -> tuple[int, ...]:
        """The mask, written out, of length `response`."""
        return (1,) * self.response if self.mask is None else self.mask

    @property
    def length(self) -> int:
        """Routed tokens: prompt and response."""
        return self.prompt + self.response

    @property
    def n(self) -> int:
        """Response tokens that count."""
        return sum(self.counted)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer step on one mini-batch.

    Replica d holds the consecutive block of `B / D` sequences that starts at `d * B / D`, and
    splits it into consecutive micro-batches of `micro_batch_size` sequences. With `max_token_len`
    (tokens a rank) verl splits it instead, as under `use_dynamic_bsz`; `t` and `K` are then unknown
    before the run. `vpp` is the number of virtual stages a pipeline rank interleaves. `clip=False`
    puts the clip bounds out of reach. `ValueError` names the field, its value and what is allowed.
    Loss and mode are names: `check_runs` says whether the installed verl knows them.
    """

    sequences: tuple[Sequence, ...]
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    micro_batch_size: int = 1
    max_token_len: int | None = None
    loss: str = "gspo"
    mode: str = "seq-mean-token-mean"
    clip: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.28
    loss_scale_factor: int | None = None
    rollout_weights: bool = False
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    regime: str = "per-token"
    layout: str = "zigzag"
    dtype: str = "float64"
    seed: int = 0

    def __post_init__(self):
        seqs = self.sequences
        if not isinstance(seqs, list | tuple) or not all(isinstance(s, Sequence) for s in seqs):
            _refuse("sequences", seqs, "a list of Sequence")
        if not seqs:
            _refuse("sequences", seqs, "a list of at least one Sequence")
        object.__setattr__(self, "sequences", tuple(seqs))
        for name in ("dp", "cp", "tp", "pp", "micro_batch_size"):
            _integer(name, getattr(self, name))
        _integer("seed", self.seed, least=0)
        for name in ("loss_scale_factor", "max_token_len", "vpp"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), also="None or ")
        if self.vpp is not None and self.pp == 1:
            _refuse("vpp", self.vpp, "None unless pp is above 1")
        for name in ("clip", "rollout_weights"):
            if type(getattr(self, name)) is not bool:
                _refuse(name, getattr(self, name), "true or false")
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                _refuse(name, value, "a finite number, 0 or more")
            object.__setattr__(self, name, float(value))
        for name in ("loss", "mode"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                _refuse(name, getattr(self, name), "a name")
        for name, names in (("regime", REGIMES), ("layout", LAYOUTS), ("dtype", DTYPES)):
            _one_of(name, getattr(self, name), names)
        if self.B % self.D:
            _refuse("dp", self.D, f"a divisor of the {self.B} sequences")
        if self.B // self.D % self.micro_batch_size:
            _refuse(
                "micro_batch_size",
                self.micro_batch_size,
                f"a divisor of the {self.B // self.D} sequences of a replica",
            )
        if not any(self.n):
            raise ValueError(
                f"sequences have {self.n} counted response tokens, allowed is at least one in all"
            )

    @property
    def B(self) -> int:
        """Sequences in the mini-batch, fully masked ones included."""
        return len(self.sequences)

    @property
    def D(self) -> int:
        """Data-parallel replicas."""
        return self.dp

    @property
    def C(self) -> int:
        """Context-parallel ranks."""
        return self.cp

    @property
    def M(self) -> int:
        """Micro-batches of a replica."""
        return self.B // self.D // self.micro_batch_size

    @property
    def n(self) -> tuple[int, ...]:
        """Response tokens that count, for each sequence."""
        return tuple(s.n for s in self.sequences)

    @property
    def t(self) -> tuple[tuple[int, ...], ...]:
        """Routed tokens (prompt and response) of micro-batch m of replica d: `t[d][m]`."""
        return tuple(
            tuple(sum(self.sequences[s].length for s in part) for part in replica)
            for replica in self.micro_batches()
        )

    @property
    def T(self) -> int:
        """Routed tokens of the mini-batch."""
        return sum(s.length for s in self.sequences)

    @property
    def K(self) -> int:
        """What Megatron divides by when every rank reports `t // C`, as verl 0.9.1 does."""
        return divisor(self.t, self.C)

    def micro_batches(self) -> tuple[tuple[range, ...], ...]:
        """Indices of the sequences of micro-batch m of replica d: `[d][m]`.

        `ValueError` with `max_token_len`, since verl makes them then.
        """
        if self.max_token_len is not None:
            _refuse("max_token_len", self.max_token_len, "None where micro-batches must be known")
        b, size = self.B // self.D, self.micro_batch_size
        return tuple(
            tuple(range(d * b + m * size, d * b + (m + 1) * size) for m in range(self.M))
            for d in range(self.D)
        )

    def to_yaml(self) -> str:
        """YAML that `from_yaml` turns into an equal case."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["sequences"] = [_sequence_to_dict(s) for s in self.sequences]
        return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)

    @classmethod
    def from_yaml(cls, text: str) -> "Case":
        """The case that YAML `text` says. `ValueError` for a missing or an unknown key."""
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"case is not YAML: {error}") from error
        values = _known(cls, "case", values)
        sequences = values.get("sequences")
        if not isinstance(sequences, list):
            _refuse("sequences", sequences, "a list of mappings with prompt and response")
        seqs = tuple(Sequence(**_known(Sequence, "sequences", s)) for s in sequences)
        return cls(**values | {"sequences": seqs})


def check_runs(case: Case) -> None:
    """`ValueError` unless the installed verl knows the loss and the mode of `case`.

    What runs verl calls it. A case itself may be older, or newer, than the installed verl.
    """
    _one_of("loss", case.loss, losses())
    _one_of("mode", case.mode, modes())


def divisor(t: tuple[tuple[int, ...], ...], C: int) -> int:
    """Megatron's divisor for routed tokens `t[d][m]` when each of C ranks reports `t // C`."""
    return C * sum(tokens // C for replica in t for tokens in replica)


def _refuse(field, value, allowed):
    raise ValueError(f"{field} is {value!r}, allowed is {allowed}")


def _one_of(field, value, names):
    if value not in names:
        _refuse(field, value, "one of " + ", ".join(names))


def _integer(field, value, least=1, also=""):
    if type(value) is not int or value < least:
        _refuse(field, value, f"{also}an integer, {least} or more")


def _sequence_to_dict(s):
    mask = {} if s.mask is None else {"mask": list(s.mask)}
    return {"prompt": s.prompt, "response": s.response} | mask


def _known(cls, field, values):
    """`values`, a mapping that has all keys `cls` needs and none that it does not know."""
    if not isinstance(values, dict):
        _refuse(field, values, "a mapping")
    names = [f.name for f in fields(cls)]
    for key in values:
        if key not in names:
            raise ValueError(f"{field} has the unknown key {key!r}, allowed are {', '.join(names)}")
    for f in fields(cls):
        if f.default is dataclasses.MISSING and f.name not in values:
            raise ValueError(f"{field} has no key {f.name!r}, which is needed")
    return values


@functools.cache
def losses() -> tuple[str, ...]:
    """Policy losses that the installed verl registers, in its order.

    Read from the decorators `@register_policy_loss("...")` in `verl/trainer/ppo/core_algos.py`
    (verl 0.9.1). `ValueError` if there are none.
    """
    names = tuple(
        d.args[0].value
        for node in parsed("verl.trainer.ppo.core_algos").body
        if isinstance(node, ast.FunctionDef)
        for d in node.decorator_list
        if isinstance(d, ast.Call) and getattr(d.func, "id", "") == "register_policy_loss"
    )
    if not names:
        raise ValueError("the installed verl registers no policy loss where 0.9.1 does")
    return names


@functools.cache
def modes() -> tuple[str, ...]:
    """Aggregation modes that the installed verl accepts, in its order.

    Read from the list `valid_loss_agg_modes` in `ActorConfig.__post_init__`,
    `verl/workers/config/actor.py` (verl 0.9.1). `ValueError` if it is not there.
    """
    for node in ast.walk(parsed("verl.workers.config.actor")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == (
            "valid_loss_agg_modes"
        ):
            return tuple(ast.literal_eval(node.value))
    raise ValueError("the installed verl has no list valid_loss_agg_modes where 0.9.1 has it")
