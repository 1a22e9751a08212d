"""A tiny transformer in plain torch: the forward pass of Megatron-Core's `GPTModel` on one process.

RMSNorm (arXiv 1910.07467), rotary positions (arXiv 2104.09864), grouped-query attention
(arXiv 2305.13245), SwiGLU (arXiv 2002.05202) and, if asked, a top-k mixture of experts
(arXiv 1701.06538). No biases, no dropout, an untied output layer. Parameters have the names and
shapes of Megatron-Core 0.16.1 at TP = PP = 1, with its local layer spec.
"""

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .case import Case

EPSILON = 1e-5  # Megatron's layernorm_epsilon
ROTARY_BASE = 10000  # and rotary_base
GAIN = {"output_layer": 2.0, "router": 2.0}  # other matrices 1.5


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the transformer. `experts=None` is the dense one, `topk` is for the other.

    `aux` is Megatron's coefficient of the auxiliary loss that balances the experts. It acts in the
    engine only: the plain transformer has no such loss.

    Each of `groups` key-value heads serves `heads / groups` query heads; `ffn` is the width of
    an MLP, also of one expert. `ValueError` names the field, its value and what is allowed.
    """

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    ffn: int = 64
    vocab: int = 64
    experts: int | None = None
    topk: int = 2
    aux: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "aux" or (field.name == "experts" and value is None):
                continue
            if type(value) is not int or value < 1:
                _refuse(field.name, value, "an integer, 1 or more")
        if type(self.aux) is not float or not 0 <= self.aux < math.inf:
            _refuse("aux", self.aux, "a finite number, 0 or more")
        if self.aux and self.experts is None:
            _refuse("aux", self.aux, "0.0 without experts")
        if self.hidden % (2 * self.heads):
            _refuse("hidden", self.hidden, f"a multiple of {2 * self.heads}, twice the heads")
        if self.heads % self.groups:
            _refuse("groups", self.groups, f"a divisor of the {self.heads} heads")
        # one expert a token has the weight 1 after the softmax, so that the router learns nothing
        if self.experts is not None and not 2 <= self.topk <= self.experts:
            _refuse("topk", self.topk, f"an integer from 2 to the {self.experts} experts")

    @property
    def channels(self) -> int:
        """Dimension of a head."""
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its name in Megatron, in Megatron's order."""
        h, mlp = self.hidden, {"linear_fc1": (2 * self.ffn, self.hidden)}
        mlp["linear_fc2"] = (self.hidden, self.ffn)
        if self.experts is not None:
            experts = range(self.experts)
            mlp = {f"experts.local_experts.{e}.{k}": v for e in experts for k, v in mlp.items()}
            mlp = {"router": (self.experts, h)} | mlp
        layer = {
            "input_layernorm": (h,),
            "self_attention.linear_proj": (h, h),
            "self_attention.linear_qkv": ((self.heads + 2 * self.groups) * self.channels, h),
            "pre_mlp_layernorm": (h,),
        } | {f"mlp.{k}": v for k, v in mlp.items()}
        names = {"embedding.word_embeddings": (self.vocab, h)}
        for i in range(self.layers):
            names |= {f"decoder.layers.{i}.{k}": v for k, v in layer.items()}
        names |= {"decoder.final_layernorm": (h,), "output_layer": (self.vocab, h)}
        return {f"{k}.weight": v for k, v in names.items()}


def weights(model: Model, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Parameters of `model` by name. Each depends on seed, its name and its shape only.

    Drawn in float64 and rounded to `dtype`. Embeddings and logits have a standard deviation of 1
    and about 2, so that probabilities differ and routers choose clearly.
    """
    return {
        name: _drawn(name, shape, generator(seed, name)).to(dtype)
        for name, shape in model.shapes().items()
    }


def generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for what `name` names, the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def token_ids(case: Case, model: Model) -> list[Tensor]:
    """Token ids of every sequence, prompt and response, int64 `(n,)` each.

    A function of the case's lengths and seed and of the vocabulary only.
    """
    ids = torch.randint(model.vocab, (case.T,), generator=generator(case.seed, "token_ids"))
    return list(ids.split([s.length for s in case.sequences]))


def logits(model: Model, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits `(n, vocab)` of one sequence of token ids `(n,)`, in the dtype of `weights`.

    As `GPTModel.forward` of Megatron-Core 0.16.1 on one process. `ValueError` for an empty
    sequence or one that is not a vector.
    """
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"ids have shape {tuple(ids.shape)}, allowed is (n,) with n of 1 or more")
    x = weights["embedding.word_embeddings.weight"][ids]
    for i in range(model.layers):
        layer = f"decoder.layers.{i}."
        w = {k.removeprefix(layer): v for k, v in weights.items() if k.startswith(layer)}
        x = x + attention(model, w, rms_norm(x, w["input_layernorm.weight"]))
        x = x + feed_forward(model, w, rms_norm(x, w["pre_mlp_layernorm.weight"]))
    x = rms_norm(x, weights["decoder.final_layernorm.weight"])
    return x @ weights["output_layer.weight"].T


def log_softmax(model: Model, weights: dict[str, Tensor], ids: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of every next token, `(n, vocab)` for each sequence `(n,)`."""
    return [logits(model, weights, x).log_softmax(-1) for x in ids]


def log_probs(rows: list[Tensor], ids: list[Tensor]) -> list[Tensor]:
    """Of `log_softmax` rows those of the labels, `(n,)` each: row i is
    `log p(ids[i + 1] | ids[: i + 1])`.

    The last row, which no loss reads, has the sequence's own first token as its label. So has
    verl 0.9.1's `preprocess_thd_engine(need_roll=True)` where context parallelism does not pad the
    sequence; elsewhere its label there is a padding zero or the next sequence's first token.
    """
    labels = [x.roll(-1)[:, None] for x in ids]
    return [row.gather(-1, label)[:, 0] for row, label in zip(rows, labels, strict=True)]


def entropies(rows: list[Tensor]) -> list[Tensor]:
    """Entropy of every distribution of `log_softmax`, in nats, `(n,)` for each sequence.

    As verl 0.9.1's `vocab_parallel_entropy` at temperature 1.
    """
    return [-(row.exp() * row).sum(-1) for row in rows]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """`x / sqrt(mean(x^2) + 1e-5) * weight` over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def attention(model: Model, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal grouped-query attention on the rows `(n, hidden)` of one sequence.

    Rows of `linear_qkv`: for each group its query heads, its key head, its value head.
    """
    n, g, c = len(x), model.groups, model.channels
    share = model.heads // g
    qkv = (x @ w["self_attention.linear_qkv.weight"].T).view(n, g, share + 2, c)
    query = rotate(qkv[:, :, :share].reshape(n, model.heads, c))
    key = rotate(qkv[:, :, share]).repeat_interleave(share, 1)
    value = qkv[:, :, share + 1].repeat_interleave(share, 1)
    scores = torch.einsum("qhc,khc->hqk", query, key) / c**0.5
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khc->qhc", shares, value)
    return mixed.reshape(n, -1) @ w["self_attention.linear_proj.weight"].T


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on heads `(n, heads, c)`: pairs are channels j and j + c/2.

    Angles, cosines and sines are float32 whatever x is, as in Megatron's `RotaryEmbedding`, whose
    frequencies are float32 constants that no option changes.
    """
    n, _, c = x.shape
    steps = torch.arange(0, c, 2, dtype=torch.float32, device=x.device) / c
    positions = torch.arange(n, dtype=torch.float32, device=x.device)
    angles = torch.outer(positions, 1.0 / ROTARY_BASE**steps)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def feed_forward(model: Model, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The MLP, or each row's topk experts weighted by the softmax of their router logits.

    Only the chosen logits enter the softmax, as in Megatron's `TopKRouter` with
    `moe_router_pre_softmax=False`. There it is rounded to float32, here it is not.
    """
    if model.experts is None:
        return swiglu(w, "mlp", x)
    chosen = (x @ w["mlp.router.weight"].T).topk(model.topk, dim=-1)
    shares = x.new_zeros(len(x), model.experts)
    shares = shares.scatter(1, chosen.indices, chosen.values.softmax(-1))
    parts = (swiglu(w, f"mlp.experts.local_experts.{e}", x) for e in range(model.experts))
    return sum(share[:, None] * part for share, part in zip(shares.T, parts, strict=True))


def swiglu(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """`(silu(gate) * up) @ fc2.T`. Rows of fc1: all of the gate, then all of up."""
    gate, up = (x @ w[f"{name}.linear_fc1.weight"].T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w[f"{name}.linear_fc2.weight"].T


def _drawn(name, shape, g):
    """Norms near 1, embeddings of deviation 1, matrices of gain / sqrt(columns)."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    kind = name.split(".")[-2]
    if len(shape) == 1:
        return 1 + 0.1 * x
    if kind == "word_embeddings":
        return x
    return GAIN.get(kind, 1.5) / shape[1] ** 0.5 * x


def _refuse(field, value, allowed):
    raise ValueError(f"{field} is {value!r}, allowed is {allowed}")
