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
BOTH = ["per-token", "averaging"]
TURNS = "calculate_per_token_loss"


def regimes(s: Settings) -> tuple[list[str], str]:
    """Which regimes the engine can be in, and why, in words. Both, where it is not known."""
    if s.dynamic_cp:
        return ["per-token"], f"verl turns {TURNS} on for dynamic CP"
    if s.per_token:
        return ["per-token"], f"override_transformer_config turns {TURNS} on"
    if s.vanilla_mbridge:
        return ["averaging"], f"nothing sets {TURNS}: mbridge leaves the default"
    if s.cp == 1:
        return ["averaging"], f"nothing turns {TURNS} on at CP 1"
    if not (s.is_given("model") and s.model):
        return BOTH, (
            "it depends on the model, and actor_rollout_ref.model.path is not given: "
            f"Megatron-Bridge turns {TURNS} on for Qwen3-VL and Qwen3.5"
        )
    names = architectures(s)
    if not names:
        known = re.compile(r"qwen3[._]5|qwen3[._-]?vl", re.IGNORECASE).search(s.model)
        likely = "per-token" if known else "averaging"
        return BOTH, (
            f"no config.json at {s.hf_config or s.model} says which model it is; by its name "
            f"{likely} is likely"
        )
    on = bool(PROVIDERS & names)
    verb = "turns" if on else "leaves"
    return ["per-token" if on else "averaging"], (
        f"Megatron-Bridge {verb} {TURNS} {'on' if on else 'off'} at CP {s.cp}: "
        f"{', '.join(sorted(names))} in the model's config.json"
    )


def architectures(s: Settings) -> set[str]:
    """The model's architectures as its `config.json` names them, none where there is no such."""
    try:
        text = read_text(str(Path(s.hf_config or s.model).expanduser() / "config.json"))
        names = json.loads(text)["architectures"]
        return {name for name in names if type(name) is str}
    except (ValueError, LookupError, TypeError, RuntimeError, RecursionError):
        return set()
