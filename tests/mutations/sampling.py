"""Owns the faults in sampling, settings and judgement: by file, the name of the fault, the text, and its replacement.

Must not apply them; run.py does, in a copy.
"""

from __future__ import annotations

SAMPLING: dict[str, list[tuple[str, str, str]]] = {
    "services/sampler/advantage/advantages.py": [
        ("gae: centred", "return list(rewards)", "return _centred(rewards)"),
        ("group_std: biased", "return _scaled(rewards, degrees=1)", "return _scaled(rewards, degrees=0)"),
        ("group_std_biased: unbiased", "return _scaled(rewards, degrees=0)", "return _scaled(rewards, degrees=1)"),
        ("group_std: variance for std", "(math.sqrt(variance) + STD_FLOOR)", "(variance + STD_FLOOR)"),
        ("group_std: no floor", "STD_FLOOR = 1e-6", "STD_FLOOR = 0.0"),
        (
            "group_mean: not centred",
            "return [reward - mean for reward in rewards]",
            "return [reward for reward in rewards]",
        ),
        (
            "leave_one_out: itself among the others",
            "reward - (total - reward) / (len(rewards) - 1)",
            "reward - total / len(rewards)",
        ),
        (
            "leave_one_out: divides by all",
            "reward - (total - reward) / (len(rewards) - 1)",
            "reward - (total - reward) / len(rewards)",
        ),
        (
            "advantages: unknown counts as 0",
            "known = [reward for reward in rewards if reward is not None]",
            "known = [reward or 0.0 for reward in rewards]",
        ),
    ],
    "services/sampler/advantage/rewards.py": [
        ("overlong: ramp from L_max", "expected = ramp.longest - ramp.cache", "expected = ramp.longest"),
        (
            "overlong: ramp over L_max",
            "return (expected - tokens) / ramp.cache",
            "return (expected - tokens) / ramp.longest",
        ),
        ("overlong: no floor beyond L_max", "    return -1.0\n", "    return (expected - tokens) / ramp.cache\n"),
        ("overlong, published: unbounded", "return max(-ramp.factor, min(", "return min(0.0, min("),
        (
            "overlong, published: rewards the short",
            "min(-exceed / ramp.cache * ramp.factor, 0.0)",
            "min(-exceed / ramp.cache * ramp.factor, 1.0)",
        ),
        ("overlong, published: factor forgotten", "-exceed / ramp.cache * ramp.factor", "-exceed / ramp.cache"),
        ("reward: wrong earns 0", "Outcome.WRONG: -1.0", "Outcome.WRONG: 0.0"),
        ("reward: unknown trained as wrong", "Outcome.WRONG: -1.0}", "Outcome.WRONG: -1.0, Outcome.UNKNOWN: -1.0}"),
        ("score: 0 earns 0", "2.0 * score - 1.0", "score"),
        ("score: unknown trained as wrong", "None if outcome is Outcome.UNKNOWN else 2.0", "2.0"),
        ("score: trained as a verdict", '"score": of_score', '"score": of_verdict'),
    ],
    "services/sampler/queue/batching.py": [
        (
            "accuracy: of the groups that are kept",
            "self._verdicts += group.in_order",
            "self._verdicts += group.in_order if decision == KEPT else []",
        ),
        (
            "overlong: punishment always on",
            "punishment = (overlong.shape, ramp) if overlong.punishment else None",
            "punishment = (overlong.shape, ramp)",
        ),
        (
            "overlong: filtering ignored",
            "masked=earned is None or (recipe.algorithm.overlong.filtering and verdict.facts.truncated)",
            "masked=earned is None",
        ),
        (
            "overlong: filtered responses leave the statistics",
            "values = advantages(recipe.algorithm.advantage, rewards)",
            "kept = zip(rewards, group.in_order)\n    values = advantages(recipe.algorithm.advantage, "
            "[None if recipe.algorithm.overlong.filtering and verdict.facts.truncated else r for r, verdict in kept]"
            ")",
        ),
    ],
    "services/sampler/evaluation/scores.py": [
        (
            "avg@k: unknown counts as wrong",
            "return fmean(known) if known else None",
            "return fmean(known) * len(known) / len(responses) if known else None",
        ),
        (
            "pass@k: biased",
            "1.0 - math.comb(drawn - correct, wanted) / math.comb(drawn, wanted)",
            "1.0 - (1 - correct / drawn) ** wanted",
        ),
        (
            "maj@k: the empty answer votes",
            "        if response.answer:\n            votes",
            "        if response.answer is not None:\n            votes",
        ),
        ("maj@k: ties are won", "return fmean([fmean(verdicts)", "return max([fmean(verdicts)"),
        ("standard error: of the values, not of their mean", "stdev(known) / math.sqrt(len(known))", "stdev(known)"),
    ],
    "services/sampler/evaluation/evaluator.py": [
        ("evaluation: drawn at the training's top-p", "top_p=settings.top_p", "top_p=recipe.rollout.top_p"),
    ],
    "services/sampler/backpressure.py": [
        (
            "generation batch: no barrier",
            "waits = (flow.generating > 0 and not limits.undispatched) or",
            "waits = False or",
        ),
        (
            "refill: filtered groups are not made up for",
            "max(flow.survival, 0.05)",
            "1.0",
        ),
        (
            "staleness: off by one",
            "return consuming_step - oldest_step",
            "return consuming_step - oldest_step - 1",
        ),
    ],
    "services/sampler/queue/dispatch.py": [
        (
            "generation batches: without end",
            "return 0 < self._rule.max_generation_batches <= self._generation_batches",
            "return False",
        ),
    ],
    "services/sampler/queue/publication.py": [
        (
            "staleness: the surplus is always thrown away",
            "staleness(consuming, version_steps[version]) > bound",
            "staleness(consuming, version_steps[version]) > 0",
        ),
        (
            "staleness: the bound is not kept",
            "staleness(consuming, version_steps[version]) > bound",
            "staleness(consuming, version_steps[version]) > 1000",
        ),
    ],
    "services/sampler/data/gathering.py": [
        (
            "data: a question counts as often as it stands there",
            "key = normalised(",
            "key = str(self.rows) + normalised(",
        ),
    ],
    "services/settings/presets.py": [
        ("dapo: the script's warm-up", "Setting(20, ", "Setting(10, "),
        ("dapo: the script's dual clip", 'Setting(None, f"{PAPER} Eq. 8 has none")', 'Setting(10.0, "")'),
        ("dapo: symmetric clip", "Setting(0.28, ", "Setting(0.2, "),
        ("dapo-verl: the paper's weight decay", 'Setting(0.1, f"{SCRIPT}: weight', 'Setting(0.0, f"{SCRIPT}: weight'),
        ("dapo-verl: the surplus waits", 'Setting(0, f"{CODE}: generation', 'Setting(1, f"{CODE}: generation'),
        ("grpo: DAPO's reduction", 'Setting("sample", "DeepSeekMath', 'Setting("token", "DeepSeekMath'),
        ("dr-grpo: divides by the standard deviation", 'Setting("group_mean", ', 'Setting("group_std", '),
        ("gspo: the ratio of tokens", 'Setting("sequence", ', 'Setting("token", '),
        ("cispo: a lower bound", 'Setting(1.0, f"{M1}', 'Setting(0.2, f"{M1}'),
        ("presets: they overrule the recipe", "document.setdefault(name, value)", "document[name] = value"),
    ],
    "verifier/sandbox/finding.py": [
        (
            "judgement: out of time is wrong",
            "Finding(Outcome.UNKNOWN, 0.0, reason[:REASON_CHARACTERS], fault=fault)",
            "Finding(Outcome.WRONG, 0.0, reason[:REASON_CHARACTERS], fault=fault)",
        ),
    ],
    "verifier/sandbox/lane.py": [
        ("judgement: texts that are evaluated share a process", "if process is None or apart:", "if process is None:"),
        (
            "judgement: a text that writes its own reply is believed",
            "if apart:\n            process.check_ended()",
            "if False:\n            process.check_ended()",
        ),
    ],
    "verifier/sandbox/background.py": [
        ("judgement: a text that takes long holds up the others", "if not self.room:", "if True:"),
        ("judgement: hangs run before texts that only take long", "each.level < level", "each.level > level"),
    ],
    "verifier/verifiers/reasoning_gym.py": [
        (
            "reasoning-gym: answers that run code are run",
            "if evaluates(task) and not is_plain(task, answer, oracle):",
            "if False:",
        ),
    ],
    "verifier/sandbox/process.py": [
        ("judgement: another text's is taken", "if reply.to != mark:", "if False:"),
    ],
    "rollout/engine.py": [
        ("engine: log-probs of the raw logits", '"processed_logprobs"', '"raw_logprobs"'),
        ("engine: the model folder's sampling", '"generation_config": "vllm"', '"generation_config": "auto"'),
        ("engine: eager ignored", "rollout.eager or rollout.gpus == 0", "rollout.gpus == 0"),
    ],
    "verifier/verifiers/answer_line.py": [
        ("answer line: the first one wins", "str(found[-1])", "str(found[0])"),
        ("answer line: the whole response is read", "text[-TAIL:]", "text"),
    ],
    "services/sampler/advantage/filtering.py": [
        ("filter: keeps all-correct groups", "0 < correct < known", "0 < correct <= known"),
        ("filter: keeps all-wrong groups", "0 < correct < known", "0 <= correct < known"),
        ("filter: unknown counts as wrong", "0 < correct < known", "0 < correct < len(outcomes)"),
        ("spread: unknown scores count", "if outcome is not Outcome.UNKNOWN]", "]"),
        ("spread: only more than min_spread", ">= min_spread - ROUNDING", "> min_spread + ROUNDING"),
        ("spread: of the scores' mean", "max(known) - min(known)", "max(known) - sum(known) / len(known)"),
        ("filter: too few known verdicts pass", "if known < min_known:", "if known < 1:"),
        ("filter: cannot be switched off", "if enabled and not", "if not"),
    ],
    "services/sampler/selection/posterior.py": [
        ("posterior: evidence never fades", "return float(0.5 ** (max(0, steps) / self._half_life))", "return 1.0"),
        (
            "posterior: right for wrong",
            "EVIDENCE.pack(right + fresh * correct, wrong + fresh * (known - correct), newest)",
            "EVIDENCE.pack(right + fresh * (known - correct), wrong + fresh * correct, newest)",
        ),
    ],
    "services/sampler/selection/screening.py": [
        (
            "screen: an unknown verdict counts as alike",
            "if unknown == 0 and not rule.keeps(outcomes, scores):",
            "if not rule.keeps(outcomes, scores):",
        ),
        ("screen: completes what is alike", "and not rule.keeps(", "and rule.keeps("),
    ],
    "services/sampler/selection/strategies.py": [
        (
            "boundary: the worst of those seen",
            "if best is None or chance > best[0]:",
            "if best is None or chance < best[0]:",
        ),
        ("boundary: explores when it should not", "    if explores:\n", "    if not explores:\n"),
    ],
    "services/sampler/selection/order.py": [
        (
            "oldest_first: the newest first",
            "lambda oldest_version, kept_order: (oldest_version, kept_order)",
            "lambda oldest_version, kept_order: (-oldest_version, kept_order)",
        ),
        ("mini-batches: groups as they were completed", "    names = sorted(groups)\n", "    return list(groups)\n"),
        ("mini-batches: groups in the order of dispatch", "    Random(", "    return names\n    Random("),
        ("mini-batches: the same shuffle at each step", 'Random(f"{seed} {step}")', 'Random(f"{seed}")'),
    ],
    "services/sampler/queue/unknowns.py": [
        (
            "unknown verdicts: decides on a handful",
            "if len(self._last) == self._last.maxlen else 0.0",
            "if self._last else 0.0",
        ),
        ("unknown verdicts: never leave the window", "self._unknown -= self._last[0]", "pass"),
        ("unknown verdicts: a resumed run pauses at once", "        self._last.clear()\n", "        pass\n"),
        ("unjudgeable: after one group", "GROUPS_IN_A_ROW = 2", "GROUPS_IN_A_ROW = 1"),
        ("unjudgeable: damaged payloads count", "if any(is_damage(", "if False and any(is_damage("),
        ("unjudgeable: not in a row", "self._in_a_row.pop(prompt, None)", "self._in_a_row.get(prompt)"),
    ],
    "services/sampler/queue/starvation.py": [
        (
            "escalation: pauses in place of a partial batch",
            "escalation.pause_after if not kept or escalation.partial_after is None else None",
            "escalation.pause_after",
        ),
        ("escalation: counts groups, not batches", "judged >= after * groups_per_step", "judged >= after"),
    ],
}
