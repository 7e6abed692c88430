"""Owns the presets: for each published algorithm its settings, and the source of each value.

Must not hold code of an algorithm; a preset only fills in settings that a recipe does not give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PAPER = "DAPO paper (arXiv 2503.14476)"
SCRIPT = "verl run_dapo_qwen2.5_32b.sh"
CODE = "verl recipe/dapo"
PPO_PAPER = "PPO (arXiv 1707.06347)"
TRL = "TRL's PPO trainer"
CHOICE = "Penstock's choice"
DR = "Dr. GRPO paper (arXiv 2503.20783)"
DR_SCRIPT = "understand-r1-zero qwen2.5-math-7b.sh"
GSPO_PAPER = "GSPO paper (arXiv 2507.18071)"
M1 = "MiniMax-M1 (arXiv 2506.13585)"


class Setting(NamedTuple):
    """A value of a preset and its source: a line of the paper or script."""

    value: Any
    source: str


DAPO: dict[str, Setting] = {
    "algorithm.reward": Setting("verdict", f"{PAPER} Eq. 7: +1 or -1"),
    "algorithm.group_size": Setting(16, f"{PAPER} 4.1: 16 responses per prompt"),
    "algorithm.ratio": Setting("token", f"{PAPER} Eq. 8"),
    "algorithm.clipping": Setting("clip_higher", f"{PAPER} Eq. 10"),
    "algorithm.clip_low": Setting(0.2, f"{PAPER} 4.1: epsilon_low"),
    "algorithm.clip_high": Setting(0.28, f"{PAPER} 4.1: epsilon_high"),
    "algorithm.dual_clip": Setting(None, f"{PAPER} Eq. 8 has none"),
    "algorithm.reduction": Setting("token", f"{PAPER} 3.3; Eq. 8 as printed is group_token, {CODE} is token"),
    "algorithm.advantage": Setting("group_std", f"{PAPER} Eq. 9 writes std(); n - 1 as in {CODE}"),
    "algorithm.proximal": Setting("recomputed", f"{PAPER} Eq. 8: pi_old at the start of the rollout step"),
    "algorithm.correction": Setting("auto", f"{CHOICE}: the paper has none; truncated IS unless exact and on-policy"),
    "algorithm.kl_coefficient": Setting(0.0, f"{PAPER} 2.3: KL removed"),
    "algorithm.entropy_coefficient": Setting(0.0, f"{PAPER} Eq. 8 has none; {SCRIPT}: entropy_coeff=0"),
    "algorithm.overlong.filtering": Setting(False, f"{PAPER} 3.4: replaced by soft punishment in the final row"),
    "algorithm.overlong.punishment": Setting(True, f"{PAPER} 3.4"),
    "algorithm.overlong.shape": Setting("paper", f"{PAPER} Eq. 13"),
    "algorithm.overlong.factor": Setting(1.0, f"{PAPER} Eq. 13 has none"),
    "algorithm.overlong.cache": Setting(None, f"{PAPER} 4.1: 4096 of 20480, a fifth of rollout.max_new_tokens"),
    "algorithm.dynamic_sampling.enabled": Setting(True, f"{PAPER} Eq. 11: 0 < correct < G"),
    "algorithm.dynamic_sampling.refill": Setting("continuous", f"{PAPER} Algorithm 1: sample until the buffer is full"),
    "rollout.temperature": Setting(1.0, f"{SCRIPT}: temperature=1.0; the paper states none for training"),
    "rollout.top_p": Setting(1.0, f"{SCRIPT}: top_p=1.0; the paper states none for training"),
    "learner.learning_rate": Setting(1e-6, f"{PAPER} 4.1: AdamW, constant 1e-6"),
    "learner.warmup_rollout_steps": Setting(20, f"{PAPER} 4.1: linear over 20 rollout steps"),
    "learner.weight_decay": Setting(0.0, f"{CHOICE}: not in the paper"),
    "learner.gradient_clip": Setting(1.0, f"not in the paper; {SCRIPT}: grad_clip=1.0"),
    "limits.max_staleness": Setting(1, f"{CHOICE}: the paper is synchronous (0)"),
    "evaluation.temperature": Setting(1.0, f"{PAPER} 4.1: T = 1.0"),
    "evaluation.top_p": Setting(0.7, f"{PAPER} 4.1: top-p 0.7"),
}

DAPO_VERL: dict[str, Setting] = DAPO | {
    "algorithm.dual_clip": Setting(10.0, f"{SCRIPT}: clip_ratio_c=10.0"),
    "algorithm.reduction": Setting("token", f"{SCRIPT}: loss_agg_mode=token-mean"),
    "algorithm.advantage": Setting("group_std", "verl core_algos.py: torch.std, unbiased, + 1e-6"),
    "algorithm.correction": Setting("none", f"{SCRIPT} sets no rollout importance sampling"),
    "algorithm.overlong.shape": Setting("published", "verl reward_manager/dapo.py: min(-exceed / buffer x factor, 0)"),
    "algorithm.overlong.factor": Setting(1.0, f"{SCRIPT}: penalty_factor=1.0"),
    "algorithm.overlong.cache": Setting(None, f"{SCRIPT}: overlong_buffer.len = 4096 of 20480"),
    "algorithm.dynamic_sampling.refill": Setting("generation_batches", f"{SCRIPT}: filter after each generation batch"),
    "algorithm.dynamic_sampling.generation_batch_factor": Setting(3, f"{SCRIPT}: gen_batch_size = 512 x 3"),
    "algorithm.dynamic_sampling.max_generation_batches": Setting(10, f"{SCRIPT}: max_num_gen_batches=10"),
    "learner.learning_rate": Setting(1e-6, f"{SCRIPT}: optim.lr=1e-6"),
    "learner.warmup_rollout_steps": Setting(10, f"{SCRIPT}: lr_warmup_steps=10"),
    "learner.weight_decay": Setting(0.1, f"{SCRIPT}: weight_decay=0.1"),
    "limits.max_staleness": Setting(0, f"{CODE}: generation and learning alternate"),
    "evaluation.top_p": Setting(0.7, f"{SCRIPT}: val_kwargs.top_p=0.7"),
}

GRPO: dict[str, Setting] = DAPO | {
    "algorithm.clipping": Setting("symmetric", "DeepSeekMath (arXiv 2402.03300) Eq. 3"),
    "algorithm.clip_low": Setting(0.2, f"{PAPER} 3.1: the usual epsilon"),
    "algorithm.clip_high": Setting(0.2, f"{PAPER} 3.1: the usual epsilon"),
    "algorithm.reduction": Setting("sample", "DeepSeekMath (arXiv 2402.03300) Eq. 3: 1/G sum 1/|o_i| sum"),
    "algorithm.kl_coefficient": Setting(0.001, "DeepSeek-R1 (arXiv 2501.12948v2): R1-Zero; DeepSeekMath has 0.04"),
    "algorithm.overlong.punishment": Setting(False, "DeepSeekMath (arXiv 2402.03300) has none"),
    "algorithm.dynamic_sampling.enabled": Setting(False, "DeepSeekMath (arXiv 2402.03300) has none"),
    "learner.learning_rate": Setting(3e-6, "DeepSeek-R1 (arXiv 2501.12948v2): R1-Zero; DeepSeekMath has 1e-6"),
    "learner.warmup_rollout_steps": Setting(0, f"{CHOICE}: DeepSeekMath states none"),
}


def _from_dapo(stated: dict[str, Setting]) -> dict[str, Setting]:
    """A preset with the `stated` values; the others are those of `dapo`, and their source says so."""
    return {path: Setting(value, f"{CHOICE}: as in dapo") for path, (value, _) in DAPO.items()} | stated


DR_GRPO = _from_dapo(
    {
        "algorithm.group_size": Setting(8, f"{DR} Table 6; {DR_SCRIPT}: num_samples 8"),
        "algorithm.ratio": Setting("token", f"{DR} Fig. 1: per token, as in GRPO"),
        "algorithm.clipping": Setting("symmetric", f"{DR} Fig. 1: one epsilon, as in GRPO"),
        "algorithm.clip_low": Setting(0.2, f"{DR} Table 6"),
        "algorithm.clip_high": Setting(0.2, f"{DR} Table 6"),
        "algorithm.dual_clip": Setting(None, f"{DR} Fig. 1 has none"),
        "algorithm.reduction": Setting("constant_length", f"{DR} 3.2: no 1/|o|; a constant, the generation limit"),
        "algorithm.advantage": Setting("group_mean", f"{DR} 3.2: R - mean, no division by std"),
        "algorithm.kl_coefficient": Setting(0.0, f"{DR} Table 6; {DR_SCRIPT}: beta 0"),
        "algorithm.overlong.punishment": Setting(False, f"{DR} has none: a rule-based reward alone"),
        "algorithm.dynamic_sampling.enabled": Setting(False, f"{DR} has none"),
        "rollout.temperature": Setting(1.0, f"{DR} Table 6; {DR_SCRIPT}: temperature 1"),
        "rollout.top_p": Setting(1.0, f"{DR} Table 6; {DR_SCRIPT}: top_p 1"),
        "learner.learning_rate": Setting(1e-6, f"{DR} Table 6; {DR_SCRIPT}: learning_rate 0.000001"),
        "learner.warmup_rollout_steps": Setting(0, f"{DR} Table 6: constant; {DR_SCRIPT}: lr_scheduler constant"),
        "learner.weight_decay": Setting(0.0, f"{DR} Table 6"),
        "learner.gradient_clip": Setting(1.0, f"{DR} Table 6"),
    },
)

GSPO = _from_dapo(
    {
        "algorithm.ratio": Setting("sequence", f"{GSPO_PAPER} Eq. 7"),
        "algorithm.clipping": Setting("clip_higher", f"{GSPO_PAPER} Eq. 5, with the two ranges of 5.1"),
        "algorithm.clip_low": Setting(3e-4, f"{GSPO_PAPER} 5.1: left range"),
        "algorithm.clip_high": Setting(4e-4, f"{GSPO_PAPER} 5.1: right range"),
        "algorithm.dual_clip": Setting(None, f"{GSPO_PAPER} Eq. 5 has none"),
        "algorithm.reduction": Setting("sample", f"{GSPO_PAPER} Eq. 5: mean over responses; a response has one ratio"),
        "algorithm.advantage": Setting("group_std", f"{GSPO_PAPER} Eq. 6 writes std(); n - 1 is {CHOICE}"),
        "algorithm.kl_coefficient": Setting(0.0, f"{GSPO_PAPER} Eq. 5 omits KL; its value in 5.1 is not stated"),
        "algorithm.overlong.punishment": Setting(False, f"{CHOICE}: {GSPO_PAPER} describes none"),
        "algorithm.dynamic_sampling.enabled": Setting(False, f"{CHOICE}: {GSPO_PAPER} describes none"),
        "learner.warmup_rollout_steps": Setting(0, f"{CHOICE}: {GSPO_PAPER} states none"),
    },
)

CISPO = _from_dapo(
    {
        "algorithm.ratio": Setting("token", f"{M1} Eq. 4"),
        "algorithm.clipping": Setting("cispo", f"{M1} Eq. 4 and 5"),
        "algorithm.clip_low": Setting(1.0, f"{M1} 3.1: no lower bound (a large epsilon; from 1 on there is none)"),
        "algorithm.clip_high": Setting(4.0, f"{CHOICE}, weights up to 5: {M1} 3.1 tunes it and states no value"),
        "algorithm.dual_clip": Setting(None, f"{M1} Eq. 4 has none"),
        "algorithm.reduction": Setting("token", f"{M1} Eq. 4: 1 / sum of |o_i|"),
        "algorithm.advantage": Setting("group_std", f"{M1} 3.1: that of GRPO; n - 1 is {CHOICE}"),
        "algorithm.kl_coefficient": Setting(0.0, f"{M1} 3.1: no KL term"),
        "algorithm.overlong.punishment": Setting(True, f"{M1} 3.1: DAPO's length penalty"),
        "algorithm.dynamic_sampling.enabled": Setting(True, f"{M1} 3.1: DAPO's dynamic sampling"),
    },
)

PPO = _from_dapo(
    {
        "algorithm.group_size": Setting(1, f"{PPO_PAPER} has no groups"),
        "algorithm.clipping": Setting("symmetric", f"{PPO_PAPER} Eq. 7"),
        "algorithm.clip_low": Setting(0.2, f"{PPO_PAPER} 6.1: epsilon = 0.2"),
        "algorithm.clip_high": Setting(0.2, f"{PPO_PAPER} 6.1: epsilon = 0.2"),
        "algorithm.advantage": Setting("gae", f"{PPO_PAPER} Eq. 11"),
        "algorithm.value.discount": Setting(1.0, f"{TRL}: gamma; {PPO_PAPER} has 0.99, for endless episodes"),
        "algorithm.value.gae_lambda": Setting(0.95, f"{PPO_PAPER} table 3"),
        "algorithm.value.whiten": Setting(True, f"{TRL} whitens advantages"),
        "algorithm.value.clip": Setting(0.2, f"{TRL}: cliprange_value; not in the paper"),
        "algorithm.value.coefficient": Setting(0.1, f"{TRL}: vf_coef; {PPO_PAPER} Eq. 9: c1"),
        "algorithm.value.learning_rate": Setting(1e-5, f"{CHOICE}: ten times the policy's"),
        "algorithm.overlong.punishment": Setting(False, f"{PPO_PAPER} has none"),
        "algorithm.dynamic_sampling.enabled": Setting(False, f"{PPO_PAPER} has none"),
        "learner.warmup_rollout_steps": Setting(0, f"{CHOICE}: {PPO_PAPER} has none"),
    },
)

PRESETS: Mapping[str, Mapping[str, Setting]] = {
    "dapo": DAPO,
    "dapo-verl": DAPO_VERL,
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "ppo": PPO,
}
"""By algorithm.preset; keys are dotted paths into a recipe."""


def with_preset(document: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's document with its preset's values where it gives none. Validation rejects an unknown preset."""
    sections = {name: dict(section) if isinstance(section, dict) else section for name, section in document.items()}
    algorithm = sections.get("algorithm", {})
    name = algorithm.get("preset", "dapo") if isinstance(algorithm, dict) else "dapo"
    for path, setting in PRESETS.get(name if isinstance(name, str) else "", {}).items():
        _fill_in(sections, path.split("."), setting.value)
    return sections


def _fill_in(document: dict[str, Any], path: list[str], value: Any) -> None:
    name, *rest = path
    if not rest:
        document.setdefault(name, value)
        return
    inner = document.get(name, {})
    if isinstance(inner, dict):
        document[name] = dict(inner)
        _fill_in(document[name], rest, value)
