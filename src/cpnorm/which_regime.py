"""Which of Megatron's two regimes a configuration leads to, and how one knows."""

import json
import re
from pathlib import Path

from cpnorm.settings import Settings
from cpnorm.user_file import read_text

PROVIDERS = {
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
"""Architectures for which Megatron-Bridge 0.6.2 turns the per-token regime on at CP above 1.

Read in `finalize` of `qwen3_vl_provider.py` and `qwen35_vl_provider.py` in
`megatron/bridge/models/qwen_vl`.
"""


def regimes(s: Settings) -> tuple[list[str], str]:
    """Which regimes the engine can be in, and why, in words."""
    if s.dynamic_cp:
        return ["per-token"], "verl turns calculate_per_token_loss on for dynamic CP"
    if s.per_token:
        return ["per-token"], "override_transformer_config turns calculate_per_token_loss on"
    if s.cp == 1:
        return ["averaging"], "nothing turns calculate_per_token_loss on at CP 1"
    if s.vanilla_mbridge:
        return ["averaging"], "nothing sets calculate_per_token_loss: mbridge leaves the default"
    if not (s.is_given("model") and s.model):
        return ["per-token", "averaging"], (
            "it depends on the model, and actor_rollout_ref.model.path is not given: "
            "Megatron-Bridge turns calculate_per_token_loss on for Qwen3-VL and Qwen3.5"
        )
    names, source = _architectures(s.model)
    on = bool(PROVIDERS & names)
    verb = "turns calculate_per_token_loss on" if on else "leaves calculate_per_token_loss off"
    return ["per-token" if on else "averaging"], f"Megatron-Bridge {verb} at CP {s.cp}: {source}"


def _architectures(model):
    """The model's architectures and where they are read: its config.json, else its name."""
    try:
        text = read_text(str(Path(model).expanduser() / "config.json"))
        names = json.loads(text)["architectures"]
        return set(names), f"{', '.join(names)} in the model's config.json"
    except (ValueError, LookupError, TypeError, RuntimeError):
        pass
    known = re.compile(r"qwen3[._]5|qwen3[._-]?vl", re.IGNORECASE)
    guess = known.search(model)
    name = model if guess and not known.search(Path(model).name) else Path(model).name
    return (PROVIDERS if guess else set()), f"a guess by the name {name}, no config.json at hand"
