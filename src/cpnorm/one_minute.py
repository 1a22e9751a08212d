"""One CP group by hand: verl's GSPO on every rank, summed, against one process without sharding.

Needs torch and verl only, and no GPU. Each rank's loss sees all log-probabilities and
differentiates its own rows, as after the gather of verl's `postprocess_thd_engine`. Edit the
numbers and run it again.
"""

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
from verl.workers.config import ActorConfig

CP = 4
PROMPTS, RESPONSES = [3, 4, 1, 6], [5, 9, 1, 21]  # one micro-batch a sequence

config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
config.global_batch_info.update(dp_size=1, global_batch_size=len(RESPONSES))
lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
T = sum(lengths)
K = CP * sum(t // CP for t in lengths)  # verl 0.9.1 reports t // CP on each rank

torch.manual_seed(0)
whole, summed = [], []
for prompt, response, t in zip(PROMPTS, RESPONSES, lengths, strict=True):
    x = -torch.rand(t, dtype=torch.float64)
    old, advantages = x[prompt - 1 : t - 1] + 0.1 * torch.randn(2, response, dtype=torch.float64)
    mask = torch.ones(1, response)

    def gradient(rows, leaf, at=prompt - 1, old=old, advantages=advantages, mask=mask):
        new = rows[at : at + len(old)]
        args = old[None], new[None], advantages[None], mask, "seq-mean-token-mean", config
        loss = compute_policy_loss_gspo(*args)[0]
        return torch.autograd.grad(loss * T, leaf)[0]  # x T / D, with D = 1

    leaf = x.clone().requires_grad_()
    whole.append(gradient(leaf, leaf) / T)
    chunk = torch.arange(t) // -(-t // (2 * CP))  # zigzag: chunks c and 2 CP - 1 - c
    for rank in range(CP):
        own = (chunk == rank) | (chunk == 2 * CP - 1 - rank)
        leaf = x.clone().requires_grad_()
        seen = torch.where(own, leaf, leaf.detach())
        summed.append((len(whole) - 1, gradient(seen, leaf) / K))

for s, expected in enumerate(whole):
    got = sum(part for index, part in summed if index == s)
    torch.testing.assert_close(got, expected * T / K, rtol=1e-12, atol=1e-15)
print(f"T = {T}, K = {K}: the gradient without sharding, times {T / K:.4f}")
