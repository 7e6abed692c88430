"""Owns which rewards a cluster allows, as its chart states: hosts that they reach, functions with needs, programs.

Must not know how the cluster enforces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.settings.base import Section
from services.settings.faults import invalid
from services.settings.rewards.kinds import CodeReward, PythonReward, RemoteReward
from services.settings.rewards.reward import Reward

VERIFIER, VERIFIER_CODE = "verifier", "verifier-code"
"""The roles whose pods host a run's verifiers: the second if one of its rewards runs programs."""
BESIDE_CODE = (
    "no host and no function with `needs` beside a `code` reward, because the chart's verifier-code pods, which judge "
    "all samples of such a run, reach neither"
)

StatedReward = tuple[str, Reward]
"""A reward of a recipe behind the setting that states it."""


class RewardLimits(Section):
    """What verifiers may use besides their own processes; a chart that states nothing allows nothing.

    `hosts`: those that rewards may send requests to. `functions`: whether pods for functions with needs exist.
    """

    hosts: tuple[str, ...] = ()
    functions: bool = False

    def faults(self, stated: Sequence[StatedReward], *, code: bool) -> list[str]:
        """What of a recipe's rewards the cluster does not allow, one line per fault.

        `code`: whether there may be pods that run programs.
        """
        programs = verifier_role(reward for _, reward in stated) == VERIFIER_CODE
        found: list[str] = []
        for setting, reward in stated:
            for single in reward.singles:
                if isinstance(single.options, CodeReward):
                    found += [] if code else [_no_code(setting)]
                elif reached := _reached(single):
                    # The pods for programs reach nothing: a program that escapes must find no way out.
                    why = BESIDE_CODE if programs else self._refusal(single)
                    found += [invalid(setting, reached, why)] if why else []
        return list(dict.fromkeys(found))

    def _refusal(self, single: Reward) -> str:
        """What is expected instead of a reward that reaches outside; "" if it is allowed."""
        if isinstance(single.options, RemoteReward):
            if _plain(single.options.host) in map(_plain, self.hosts):
                return ""
            return f"a host of the chart's verifier.rewardHosts ({', '.join(self.hosts) or 'it has none'})"
        return "" if self.functions else "no `needs`, because the chart's rewardFunctions.enabled is false"


def verifier_role(rewards: Iterable[Reward]) -> str:
    """The role of the pods that host the verifiers of a run with these rewards."""
    kinds = {single.kind for reward in rewards for single in reward.singles}
    return VERIFIER_CODE if "code" in kinds else VERIFIER


def leaves_verifier(reward: Reward) -> bool:
    """Whether it needs more than the verifier's confined processes."""
    return any(isinstance(single.options, CodeReward) or _reached(single) for single in reward.singles)


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
