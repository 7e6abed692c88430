"""Owns the faults in the learner: by file, the name of the fault, the text, and its replacement.

Must not apply them; run.py does, in a copy.
"""

from __future__ import annotations

LEARNER: dict[str, list[tuple[str, str, str]]] = {
    "learner/algorithm/reductions.py": [
        (
            "token: count responses, not tokens",
            "float(sum(response.tokens for response in samples if response.counted))",
            "float(sum(1 for response in samples if response.counted))",
        ),
        (
            "token: masked responses stay in the count",
            "float(sum(response.tokens for response in samples if response.counted))",
            "float(sum(response.tokens for response in samples))",
        ),
        (
            "group_token: groups weigh by their tokens",
            "return Reduction(weights, float(len(tokens)))",
            "return Reduction(weights, float(sum(tokens.values())))",
        ),
        (
            "group_token: no token mean inside the group",
            "weights = tuple(1.0 / tokens[response.group] if response.counted",
            "weights = tuple(1.0 if response.counted",
        ),
        (
            "sample: no token mean inside the response",
            "weights = tuple(1.0 / response.tokens if response.counted",
            "weights = tuple(1.0 if response.counted",
        ),
        (
            "sequence_sum: masked responses in the sum",
            'normaliser=3.0)\n    """\n    weights = tuple(1.0 if response.counted else',
            'normaliser=3.0)\n    """\n    weights = tuple(1.0 if response.tokens else',
        ),
        (
            "constant_length: the constant forgotten",
            "float(longest * sum(response.counted for response in samples))",
            "float(sum(response.counted for response in samples))",
        ),
        ("masked responses count", "return not self.masked and self.tokens > 0", "return self.tokens > 0"),
    ],
    "learner/algorithm/clipping.py": [
        (
            "clip: upper bound as the lower",
            "bounded = torch.clamp(ratio, 1.0 - low, 1.0 + high)",
            "bounded = torch.clamp(ratio, 1.0 - low, 1.0 + low)",
        ),
        (
            "clip: lower bound as the upper",
            "bounded = torch.clamp(ratio, 1.0 - low, 1.0 + high)",
            "bounded = torch.clamp(ratio, 1.0 - high, 1.0 + high)",
        ),
        ("clip: maximum for minimum", "objective=torch.minimum(", "objective=torch.maximum("),
        ("clip: only the clipped term", "torch.minimum(ratio * advantage, bounded * advantage)", "bounded * advantage"),
        (
            "symmetric: clips higher",
            "return clip_higher(logprobs, ratio, advantage, low, low)",
            "return clip_higher(logprobs, ratio, advantage, low, high)",
        ),
        ("cispo: gradient through the weight", "weight = ratio.detach().clamp(", "weight = ratio.clamp("),
        (
            "cispo: clipped tokens lose their gradient",
            "objective=weight * advantage * logprobs",
            "objective=weight * advantage * torch.where(weight == ratio, logprobs, logprobs.detach())",
        ),
        (
            "cispo: no log-prob, so no gradient",
            "objective=weight * advantage * logprobs",
            "objective=weight * advantage + 0 * logprobs",
        ),
        (
            "cispo: clipped on the harmless side only",
            "weight = ratio.detach().clamp(1.0 - low, 1.0 + high)",
            "weight = clip_higher(logprobs, ratio, advantage, low, high).objective.detach() / advantage",
        ),
        (
            "clip: low share counts rewarded tokens",
            "low=(ratio < 1.0 - low) & (advantage < 0)",
            "low=(ratio < 1.0 - low) & (advantage > 0)",
        ),
        (
            "clip: high share counts punished tokens",
            "high=(ratio > 1.0 + high) & (advantage > 0)",
            "high=(ratio > 1.0 + high) & (advantage < 0)",
        ),
        ("dual clip: for any advantage", "binds = (advantage < 0) & (ratio > bound)", "binds = ratio > bound"),
        (
            "dual clip: bounds the loss, not the ratio",
            "torch.where(binds, bound * advantage,",
            "torch.where(binds, -bound + 0 * advantage,",
        ),
    ],
    "learner/algorithm/loss.py": [
        ("dual clip: never applied", "if settings.dual_clip is not None:", "if settings.dual_clip == 0:"),
        (
            "loss: KL added to the gain",
            "gain = gain - settings.kl_coefficient * divergence",
            "gain = gain + settings.kl_coefficient * divergence",
        ),
        (
            "loss: KL weighted by the correction",
            "gain = gain - settings.kl_coefficient * divergence",
            "gain = gain - settings.kl_coefficient * correction.weighted.weight * divergence",
        ),
        (
            "loss: entropy punished",
            "gain = gain + settings.entropy_coefficient * entropy",
            "gain = gain - settings.entropy_coefficient * entropy",
        ),
        ("loss: wrong sign", "loss = -(data.weight * gain).sum()", "loss = (data.weight * gain).sum()"),
        ("loss: local mean", "loss = -(data.weight * gain).sum()", "loss = -(data.weight * gain).mean()"),
        (
            "loss: correction forgotten",
            "gain = correction.weighted.weight * clipped.objective",
            "gain = 1.0 * clipped.objective",
        ),
        (
            "loss: ratio against the behaviour policy",
            "gap = RATIOS[settings.ratio](logprobs, proximal, data.sample)",
            "gap = RATIOS[settings.ratio](logprobs, data.behaviour, data.sample)",
        ),
        ("loss: fillers in the metrics", "real = data.weight > 0", "real = data.weight >= 0"),
    ],
    "learner/algorithm/ratios.py": [
        ("log-ratio: upside down", "(numerator - denominator).clamp", "(denominator - numerator).clamp"),
        (
            "response sums: responses mixed",
            "sums.index_add(0, sample, values.double())",
            "sums.index_add(0, sample * 0, values.double())",
        ),
        (
            "sequence: product instead of the geometric mean",
            "means = response_sums(logprobs - proximal, sample) / tokens",
            "means = response_sums(logprobs - proximal, sample)",
        ),
        (
            "sequence: mean over all responses",
            "means = response_sums(logprobs - proximal, sample) / tokens",
            "means = (logprobs - proximal).double().mean() + 0 * tokens",
        ),
        ("sequence: without gradient", "return means.clamp(", "return means.detach().clamp("),
        ("sequence: unbounded", "means.clamp(-LARGEST_GAP, LARGEST_GAP).index_select", "means.index_select"),
        (
            "sequence_token: gradient of the whole response",
            "return sequence(logprobs, proximal, sample).detach() + (logprobs - logprobs.detach())",
            "return sequence(logprobs, proximal, sample)",
        ),
        (
            "sequence_token: the token's own ratio",
            "return sequence(logprobs, proximal, sample).detach() + (logprobs - logprobs.detach())",
            "return log_ratio(logprobs, proximal)",
        ),
        ("percentiles: rank one too high", "(counts.cumsum(0) < rank).sum()", "(counts.cumsum(0) <= rank).sum()"),
        ("histogram: coarse around 0", "SCALE = 1e-3\n", "SCALE = 1e-1\n"),
    ],
    "learner/algorithm/corrections.py": [
        (
            "log-ratio: unbounded",
            "response_sums(gap, sample).clamp(-LARGEST_GAP, LARGEST_GAP)",
            "response_sums(gap, sample)",
        ),
        (
            "none: weighs after all",
            "return Weighted(torch.ones_like(gap), _never(gap), _never(gap))",
            "return Weighted(torch.exp(gap), _never(gap), _never(gap))",
        ),
        (
            "importance: truncated",
            "return Weighted(torch.exp(gap), _never(gap), _never(gap))",
            "return Weighted(torch.exp(gap).clamp(max=limits.cap), _never(gap), _never(gap))",
        ),
        ("truncated_is: cap as a floor", "weight.clamp(max=limits.cap)", "weight.clamp(min=limits.cap)"),
        (
            "truncated_is: capped share counts the others",
            "weight > limits.cap, _never(gap)",
            "weight < limits.cap, _never(gap)",
        ),
        (
            "truncated_is_sequence: per token",
            "return truncated_is(totals[sample].to(gap.dtype), sample, limits)",
            "return truncated_is(gap, sample, limits)",
        ),
        (
            "truncated_is_sequence: mean instead of product",
            "return truncated_is(totals[sample].to(gap.dtype), sample, limits)",
            "return truncated_is((totals / sample.bincount())[sample].to(gap.dtype), sample, limits)",
        ),
        (
            "icepop: lower bound ignored",
            "masked = (weight < limits.low) | (weight > limits.high)",
            "masked = weight > limits.high",
        ),
        (
            "icepop: upper bound ignored",
            "masked = (weight < limits.low) | (weight > limits.high)",
            "masked = weight < limits.low",
        ),
        ("icepop: weight 1 instead of 0", "weight.masked_fill(masked, 0.0)", "weight.masked_fill(masked, 1.0)"),
        (
            "corrections: gradient flows into the weight",
            "proximal, behaviour = proximal.detach(), behaviour.detach()",
            "assert proximal.shape == behaviour.shape",
        ),
        ("mismatch_kl: the other direction", "k3(behaviour, proximal))", "k3(proximal, behaviour))"),
        (
            "effective sample size: not over the tokens",
            "total * total / (tokens * total_of_squares)",
            "total * total / total_of_squares",
        ),
    ],
    "learner/algorithm/parity.py": [
        ("parity: differences cancel out", "gap[counted].abs()", "gap[counted]"),
        ("parity: fillers compared", "counted = (replica != NOT_COMPARED) &", "counted = (replica >= NOT_COMPARED) &"),
        ("parity: one replica's mean for all", "index_add(0, where, columns)", "index_add(0, where * 0, columns)"),
        (
            "parity: off only above",
            "off = (torch.exp(gap[counted]) - 1).abs() > OFF",
            "off = (torch.exp(gap[counted]) - 1) > OFF",
        ),
    ],
    "learner/coordinator/parity_gate.py": [
        ("parity: healthy replicas named", "if found.mean > limit}", "if found.mean > 0}"),
        ("parity: any number of tokens judged", ">= JUDGED_TOKENS else", ">= 0 else"),
    ],
    "learner/algorithm/kl.py": [
        ("k3: k1", "(torch.expm1(difference) - difference)", "(-difference)"),
        ("k3: reversed", "log_ratio(reference, logprobs)", "log_ratio(logprobs, reference)"),
        ("k3: in float32", "log_ratio(reference, logprobs).double()", "log_ratio(reference, logprobs)"),
    ],
    "learner/algorithm/logprobs.py": [
        ("logprobs: temperature multiplies", "div_(temperature)", "mul_(temperature)"),
        ("logprobs: temperature forgotten", "div_(temperature)", "div_(1.0)"),
        ("logprobs: its gradient forgets the temperature", "(given / ctx.temperature for", "(given for"),
        ("logprobs: half precision stays", "logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits"),
        ("logprobs: float64 rounded", "logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits.float()"),
        ("logprobs: normaliser without gradient", "factor[part].neg().unsqueeze(-1)", "0 * factor[part].unsqueeze(-1)"),
        ("logprobs: the caller's logits are overwritten", "logits = logits.clone()", "logits = logits"),
        ("logprobs: only the first block", "range(0, len(logits), rows)", "range(0, min(rows, len(logits)), rows)"),
        ("entropy: sign of the mean logit", "normaliser - scores.mul_", "normaliser + scores.mul_"),
        ("entropy: half its gradient", "factor = of_chosen + of_entropy * entropy if", "factor = of_chosen if"),
        ("entropy: the other half of its gradient", "shares.sub_(terms)", "pass"),
        ("nucleus: its padding counts", ".masked_fill(nuclei < 0, -torch.inf)", ""),
        ("nucleus: no value for its padding", ".clamp_(min=torch.finfo(scores.dtype).min)", ""),
        (
            "nucleus: normalised over the vocabulary",
            "    if nuclei is not None:\n        targets",
            "    if nuclei is not None:\n        nuclei = None\n    if nuclei is not None:\n        targets",
        ),
        (
            "nucleus: every token's is the first one's",
            "nuclei.clamp(min=0).long()",
            "nuclei[:1].clamp(min=0).long().expand_as(nuclei)",
        ),
        (
            "entropy: gradient although unasked",
            "        if not entropy_gradient:\n",
            "        if False:\n",
        ),
        (
            "logprobs: one chunk",
            "zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), within, strict=False)",
            "[(hidden, targets, nuclei)]",
        ),
        ("logprobs: chunks of eight times the size", "CHUNK_TOKENS = 512", "CHUNK_TOKENS = 4096"),
        ("logprobs: every chunk's logits kept for the backward pass", "if torch.is_grad_enabled() and", "if False and"),
    ],
    "learner/training/shares.py": [
        (
            "shares: a row is spread although there are enough",
            "parts = -(-ranks // max(len(rows), 1))",
            "parts = ranks",
        ),
        ("shares: the shortest rows first", "key=lambda piece: -piece[0]", "key=lambda piece: piece[0]"),
        ("shares: whole groups only", "if rows and length <= row_tokens:", "if rows:"),
        (
            "shares: those of other ranks",
            "return Distribution(tuple(tuple(share) for share in shares), tokens)",
            "return Distribution(tuple(tuple(share) for share in shares[1:] + shares[:1]), tokens)",
        ),
    ],
    "learner/training/minibatches.py": [
        (
            "mini-batches: one group too many",
            "batch.groups[start : start + mini_batch_groups]",
            "batch.groups[start : start + mini_batch_groups + 1]",
        ),
        (
            "nuclei: those of the responses in reverse",
            "nuclei=_nuclei([payload for _, payload in members])",
            "nuclei=_nuclei([payload for _, payload in members[::-1]])",
        ),
        (
            "packing: positions run on",
            "np.arange(prompt, prompt + sample.tokens - 1)",
            "np.arange(place - start, end - start)",
        ),
        (
            "packing: the first token predicted from itself",
            "last, place = start + prompt - 1,",
            "last, place = start + prompt,",
        ),
        (
            "token data: advantage and weight swapped",
            "advantage, weight = per_sample",
            "weight, advantage = per_sample",
        ),
        (
            "token data: all tokens of one response",
            "torch.arange(len(members)).repeat_interleave(tokens)",
            "torch.zeros(len(members), dtype=torch.int64).repeat_interleave(tokens)",
        ),
        (
            "parity: tokens of older versions compared",
            "span.version == sampled.version",
            "span.version <= sampled.version",
        ),
        (
            "parity: the first span's tokens for every span",
            "found[span.start : span.end] = sampled",
            "found[: span.end] = sampled",
        ),
        ("filler: counts", "zero = torch.zeros(1, dtype=torch.float64)", "zero = torch.ones(1, dtype=torch.float64)"),
    ],
    "learner/training/network/attention.py": [
        ("attention: a token sees the next one", "mask.triu_(longest + 1)", "mask.triu_(longest + 2)"),
        ("attention: prompts see all of themselves", "is_causal=True", "is_causal=False"),
        (
            "attention: responses miss a token of their prompt",
            "len(mask) - (total - new)",
            "len(mask) - (total - new) + 1",
        ),
        ("attention: a window of one token more", "(back < window)", "(back <= window)"),
    ],
    "learner/training/deepspeed_engine.py": [
        ("value head: at the policy's learning rate", '"lr": value_rate}', '"lr": rate}'),
        ("accumulation: in bfloat16", '"grad_accum_dtype": "fp32"', '"grad_accum_dtype": "bf16"'),
        (
            "accumulation: the sum over ranks in bfloat16",
            '"communication_data_type": "fp32"',
            '"communication_data_type": "bf16"',
        ),
        ("AdamW: other betas", '"betas": [0.9, 0.999]', '"betas": [0.9, 0.95]'),
        ("AdamW: weight decay ignored", '"weight_decay": learner.weight_decay', '"weight_decay": 0.0'),
    ],
    "learner/training/network/policy.py": [
        (
            "policy: temperature forgotten",
            "head, temperature = self._logits(), self.temperature",
            "head, temperature = self._logits(), 1.0",
        ),
        ("policy: the head in the weights' dtype", "if dtype is None:", "if True:"),
        ("policy: entropies without gradient", "entropy_gradient=self.entropy_gradient", "entropy_gradient=False"),
    ],
    "learner/training/step_start.py": [
        (
            "proximal: the current policy at every optimizer step",
            "fresh = 1 if self._short_cut else 0",
            "fresh = len(work)",
        ),
        (
            "proximal: behaviour setting ignored",
            "return [[batch.data.behaviour for batch in part] for part in work]",
            "return _nothing(work)",
        ),
        (
            "reference: the policy in training",
            "self._logprobs(self._reference, part)",
            "self._logprobs(self._policy, part)",
        ),
        (
            "values: those of the next micro-batch",
            "values = [[output.values for output in part if output.values is not None] for part in before]",
            "values = [[output.values for output in part if output.values is not None][::-1] for part in before]",
        ),
    ],
    "learner/training/token_advantages.py": [
        ("whitening: by the moments of one rank", "total = all_reduce(total)", "total = total.clone()"),
        ("whitening: fillers count", "batch.data.weight > 0)", "batch.data.weight >= 0)"),
    ],
    "learner/algorithm/values.py": [
        ("GAE: the reward at every token", "torch.where(follows, 0.0, reward.double())", "reward.double()"),
        ("GAE: the value of the next response", "sample[:-1] == sample[1:]", "sample[:-1] == sample[:-1]"),
        ("GAE: lambda without the discount", "discount * trace)", "trace)"),
        (
            "GAE: sums of half the reach",
            "found, reach, power = found + power * further, 2 * reach, power * power",
            "found, reach, power = found + power * further, 2 * reach + 1, power * power",
        ),
        ("GAE: the returns are the rewards", "(advantage + exact)", "(reward.double())"),
        ("value loss: the smaller error", "torch.maximum(error, limited_error)", "torch.minimum(error, limited_error)"),
        (
            "value loss: the clip around the return",
            "before + moved.clamp(-clip, clip)",
            "returns + moved.clamp(-clip, clip)",
        ),
        ("value loss: not halved", "limited_error)).sum() / 2", "limited_error)).sum()"),
        ("whitening: without the mean", "(advantage - mean) /", "advantage /"),
    ],
    "learner/training/learning_rate.py": [
        (
            "warm-up: the first rollout step does not learn",
            "(rollout_steps + 1) / self._warm",
            "rollout_steps / self._warm",
        ),
    ],
    "learner/training/trainer.py": [
        (
            "parity: later steps at the policy of their own",
            "compared = [sampled if not index or not self._behaviour_is_proximal else None",
            "compared = [sampled",
        ),
        (
            "parity: the current policy at every optimizer step",
            "at_start = current if self._behaviour_is_proximal else before",
            "at_start = current",
        ),
        ("parity: one rank's tokens", "self._comparison.reduce(self._ranks.all_reduce)", "self._comparison"),
        ("warm-up: counts optimizer steps", "self._rollout_steps += 1", "self._rollout_steps += len(steps)"),
        ("ranks: gradients averaged, not summed", "found.loss * self._ranks.world", "found.loss"),
        ("ranks: metrics of one rank", "OptimizerStep(self._ranks.all_reduce(sums),", "OptimizerStep(sums,"),
        (
            "constant_length: the setting ignored",
            "recipe.algorithm.constant_length or recipe.rollout.max_new_tokens",
            "recipe.rollout.max_new_tokens",
        ),
        ("ratio: the setting ignored", "ratio=algorithm.ratio", 'ratio="token"'),
        ("clipping: the setting ignored", "clipping=algorithm.clipping", 'clipping="clip_higher"'),
        ("dual clip: the setting ignored", "dual_clip=algorithm.dual_clip", "dual_clip=None"),
        ("correction cap: the clip's", "correction_cap=algorithm.correction_cap", "correction_cap=algorithm.clip_high"),
        ("gradient clip: at stage 0 forgotten", "parameters(), self._settings.gradient_clip)", "parameters(), 1e9)"),
    ],
}
