"""Owns which rewards a cluster allows, as its chart states: hosts that they reach, functions with needs, programs.

Must not know how the cluster enforces it.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.settings.base import Section
from services.settings.faults import invalid
from services.settings.recipe import Recipe
from services.settings.rewards.kinds import CodeReward, PythonReward, RemoteReward
from services.settings.rewards.reward import Reward, parse_reward

VERIFIER, VERIFIER_CODE = "verifier", "verifier-code"
"""The roles whose pods host a run's verifiers: the second if one of its rewards runs programs."""


class RewardLimits(Section):
    """What verifiers may use besides their own processes; a chart that states nothing allows nothing.

    `hosts`: those that rewards may send requests to. `functions`: whether pods for functions with needs exist.
    """

    hosts: tuple[str, ...] = ()
    functions: bool = False

    def faults(self, recipe: Recipe, *, code: bool) -> list[str]:
        """What of a recipe's rewards the cluster does not allow, one line per fault.

        `code`: whether there may be pods that run programs.
        """
        programs = verifier_role(recipe) == VERIFIER_CODE
        found: list[str] = []
        for setting, single in _single_rewards(recipe):
            if isinstance(single.options, CodeReward):
                found += [] if code else [_no_code(setting)]
            elif reached := _reached(single):
                # The pods for programs reach nothing: a program that escapes must find no way out.
                why = _BESIDE_CODE if programs else self._refusal(single)
                found += [invalid(setting, reached, why)] if why else []
        return list(dict.fromkeys(found))

    def _refusal(self, single: Reward) -> str:
        """What is expected instead of a reward that reaches outside; "" if it is allowed."""
        if isinstance(single.options, RemoteReward):
            if _plain(single.options.host) in map(_plain, self.hosts):
                return ""
            return f"a host of the chart's verifier.rewardHosts ({', '.join(self.hosts) or 'it has none'})"
        return "" if self.functions else "no `needs`, because the chart's rewardFunctions.enabled is false"


_BESIDE_CODE = (
    "no host and no function with `needs` beside a `code` reward, because the chart's verifier-code pods, which judge "
    "all samples of such a run, reach neither"
)


def verifier_role(recipe: Recipe) -> str:
    """The role of the pods that host the run's verifiers."""
    kinds = {single.kind for reward in recipe.rewards for single in reward.singles}
    return VERIFIER_CODE if "code" in kinds else VERIFIER


def leaves_verifier(recipe: Recipe) -> bool:
    """Whether one of the recipe's rewards needs more than the verifier's confined processes."""
    return any(isinstance(single.options, CodeReward) or _reached(single) for _, single in _single_rewards(recipe))


def _single_rewards(recipe: Recipe) -> Iterator[tuple[str, Reward]]:
    """Each single reward of a recipe, with the setting that states it."""
    documents = {f"{name}.verifier": data.verifier for name, data in recipe.data_sources.items() if not data.generated}
    documents |= {f"verifier.rewards.{name}": document for name, document in recipe.verifier.rewards.items()}
    for setting, document in documents.items():
        for single in parse_reward(document).singles:
            yield setting, single


def _reached(single: Reward) -> str:
    """What a reward uses outside of the verifier's pod: a host, or a function with its needs; "" if nothing."""
    if isinstance(single.options, RemoteReward):
        return single.options.host
    if isinstance(single.options, PythonReward) and single.options.needs:
        return f"{single.options.function} (needs: {', '.join(single.options.needs)})"
    return ""


def _no_code(setting: str) -> str:
    return invalid(setting, "code", "another reward, because the chart's verifierCode.maxReplicas is 0")


def _plain(host: str) -> str:
    return host.lower().rstrip(".")
