"""The way of a response to what judges it, confined or outside, and back: no process judges here."""

import asyncio

import pytest

from services.contracts import Lane, Outcome, SandboxFault
from services.settings.rewards.reward import RewardNames, parse_reward
from verifier.judging import RewardJudges, is_confined, reward_of, sees_prompt
from verifier.sandbox.finding import Finding
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

SCORE = "python:./rewards.py:score"
NEEDS = {"python": {"function": "./rewards.py:score", "needs": ["network"]}}
SERVICE = "https://rewards/score"
OTHER = "https://rewards/other"
JUDGE = {"judge": {"url": "https://j/v1", "model": "m", "rubric": "./rubric.md"}}
DEADLINE_S = 30


class HandSandbox:
    """Stands in for the sandbox: it finds that a text is correct iff it is "right", the last text first."""

    def __init__(self):
        self.calls = []

    async def judge_all(self, texts, *, lane=Lane.TRAIN):
        self.calls.append((lane, [(reward.kind, candidate.text) for reward, candidate in texts]))
        for place, (reward, candidate) in reversed(list(enumerate(texts))):
            right = candidate.text == "right"
            outcome = Outcome.CORRECT if right else Outcome.WRONG
            yield [(place, Finding(outcome, float(right), f"{reward.kind} looked"))]


class HandJudge:
    """Stands in for what judges outside: 0.25 for each text, or what `judging` makes of the candidates."""

    def __init__(self, judging=None):
        self.judging, self.calls, self.closed = judging, [], 0

    async def judge_all(self, candidates):
        self.calls.append([candidate.text for candidate in candidates])
        if self.judging:
            return await self.judging(candidates)
        return [Judgement(correct=False, score=0.25, reason="outside") for _ in candidates]

    async def aclose(self):
        self.closed += 1


class Table:
    """What judges outside, by kind, with each judge by the text of its reward."""

    def __init__(self, judging=None):
        self.judges, self.judging = {}, judging

    def built(self, reward):
        assert reward.text not in self.judges, "one judge per reward"
        self.judges[reward.text] = HandJudge(self.judging)
        return self.judges[reward.text]

    def __call__(self):
        return dict.fromkeys(("http", "judge", "python", "code"), self.built)

    @property
    def calls(self):
        return {text: judge.calls for text, judge in self.judges.items()}


async def judged(texts, table=None, sandbox=None, lane=Lane.TRAIN):
    """The findings on (reward, text) pairs, in their order."""
    judges = RewardJudges(sandbox or HandSandbox(), (table or Table())())
    given, found = [(parse_reward(reward), Candidate(text, {})) for reward, text in texts], {}
    async with asyncio.timeout(DEADLINE_S):
        async for placed in judges.judge_all(given, lane=lane):
            assert not found.keys() & {place for place, _ in placed}, "each text has one finding"
            found.update(placed)
    return [found[place] for place in range(len(texts))]


def scores(findings):
    return [(finding.outcome.value, finding.score) for finding in findings]


CONFINED = ["math", {"math": {"last_number": True}}, "answer-line", "pattern", "reasoning-gym", SCORE, "python:m.n:f"]
OUTSIDE = [NEEDS, SERVICE, JUDGE, "code"]


def test_only_what_needs_no_more_is_confined():
    assert [is_confined(parse_reward(each)) for each in CONFINED] == [True] * len(CONFINED)
    assert [is_confined(parse_reward(each)) for each in OUTSIDE] == [False] * len(OUTSIDE)


def test_users_own_rewards_see_the_prompt():
    assert all(sees_prompt(parse_reward(each)) for each in (SCORE, NEEDS, SERVICE, JUDGE, {"all": ["math", SCORE]}))
    assert not any(sees_prompt(parse_reward(each)) for each in ("math", "code", {"any": ["pattern", "reasoning-gym"]}))


@pytest.mark.parametrize("text", ["no such", "mine", "{", '{"all":["math","mine"]}', "", '{"math":{"x":1}}'])
def test_a_text_that_is_no_reward_has_a_finding(text):
    found = reward_of(text)
    assert isinstance(found, Finding)
    assert (found.outcome, found.score, found.fault) == (Outcome.UNKNOWN, 0.0, SandboxFault.ERROR)
    assert "is not valid: expected" in found.reason


def test_the_text_of_a_reward_is_read():
    reward = RewardNames({"mine": SCORE}).resolved(parse_reward({"all": ["math", "mine"]}))
    assert reward_of(reward.text) == reward


@pytest.mark.parametrize("lane", Lane)
async def test_confined_texts_go_to_the_sandbox_together(lane):
    sandbox, table = HandSandbox(), Table()
    texts = [("math", "right"), (SCORE, "left"), ({"all": ["pattern", "math"]}, "right"), ("answer-line", "x")]
    assert scores(await judged(texts, table, sandbox, lane)) == [
        *(("correct", 1.0), ("wrong", 0.0), ("correct", 1.0), ("wrong", 0.0))
    ]
    kinds = [("math", "right"), ("python", "left"), ("pattern", "right"), ("math", "right"), ("answer-line", "x")]
    assert sandbox.calls == [(lane, kinds)]
    assert table.judges == {}


async def test_outside_texts_go_to_their_judge_together():
    sandbox, table = HandSandbox(), Table()
    texts = [(SERVICE, "a"), (OTHER, "b"), (SERVICE, "c"), (NEEDS, "d"), (JUDGE, "e"), ("code", "f")]
    assert scores(await judged(texts, table, sandbox)) == [("wrong", 0.25)] * 6
    by_reward = zip((SERVICE, OTHER, NEEDS, JUDGE, "code"), (["a", "c"], ["b"], ["d"], ["e"], ["f"]), strict=True)
    assert table.calls == {parse_reward(reward).text: [together] for reward, together in by_reward}
    assert sandbox.calls == []


async def test_parts_meet_again_in_their_order():
    """The sandbox answers in the reverse order, and the outside judge between its answers."""
    both = {"weighted": [{"name": "outer", "verifier": SERVICE, "weight": 1}, {"verifier": "math", "weight": 3}]}
    inner = {"any": [{"all": ["pattern", SERVICE]}, "answer-line"]}
    found = await judged([(both, "right"), ("math", "left"), (inner, "right"), (both, "left")])
    assert scores(found) == [("wrong", 0.8125), ("wrong", 0.0), ("correct", 1.0), ("wrong", 0.0625)]
    assert found[0].rewards == {"outer": 0.25, "math": 1.0}
    assert found[2].rewards == {"all": 0.25, "answer-line": 1.0}
    assert found[2].reason.startswith("all wrong (0.25): pattern correct (1): pattern looked; http wrong (0.25)")


async def test_a_slow_service_delays_only_its_own_texts():
    release = asyncio.Event()

    async def slow(candidates):
        await release.wait()
        return [Judgement(correct=True, score=1.0) for _ in candidates]

    judges = RewardJudges(HandSandbox(), Table(slow)())
    texts = [(parse_reward(each), Candidate("right", {})) for each in ("math", {"all": ["math", SERVICE]}, "pattern")]
    places = []
    async with asyncio.timeout(DEADLINE_S):
        async for placed in judges.judge_all(texts):
            places += [place for place, _ in placed]
            if sorted(places) == [0, 2]:
                release.set()
    assert places[-1] == 1


async def test_a_fault_of_one_text_is_its_own():
    async def some(candidates):
        return [
            UndecidedError(f"HTTP 500 for {each.text}") if each.text == "bad" else Judgement(True, 1.0)
            for each in candidates
        ]

    first, bad, last = await judged(
        [(SERVICE, "a"), (SERVICE, "bad"), ({"any": [SERVICE, "math"]}, "bad")], Table(some)
    )
    assert scores([first, bad]) == [("correct", 1.0), ("unknown", 0.0)]
    assert (bad.reason, bad.fault) == ("HTTP 500 for bad", SandboxFault.ERROR)
    assert (last.outcome, last.rewards) == (Outcome.UNKNOWN, {"math": 0.0})


async def test_a_judgement_without_a_verdict_is_unknown():
    async def none(candidates):
        return [Judgement(correct=None, score=0.0, reason="cannot say") for _ in candidates]

    [found] = await judged([(SERVICE, "a")], Table(none))
    assert (found.outcome, found.reason, found.fault) == (Outcome.UNKNOWN, "cannot say", SandboxFault.ERROR)


@pytest.mark.parametrize(
    ("judging", "error"),
    [
        (lambda candidates: [][len(candidates)], IndexError),
        (lambda candidates: [Judgement(True, 1.0)] * (len(candidates) - 1), ValueError),
    ],
)
async def test_a_judge_that_breaks_its_contract_is_an_error(judging, error):
    async def broken(candidates):
        return judging(candidates)

    with pytest.raises(error):
        await judged([(SERVICE, "a"), ("math", "b"), (SERVICE, "c")], Table(broken))


async def test_a_text_without_a_finding_is_an_error():
    class Silent(HandSandbox):
        async def judge_all(self, texts, *, lane=Lane.TRAIN):
            return
            yield

    with pytest.raises(RuntimeError, match="a text has no finding"):
        await judged([("math", "a")], sandbox=Silent())


async def test_who_stops_asking_stops_the_judging():
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(candidates):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    judges = RewardJudges(HandSandbox(), Table(endless)())
    texts = [(parse_reward(each), Candidate("right", {})) for each in ("math", SERVICE)]
    judging = judges.judge_all(texts)
    async with asyncio.timeout(DEADLINE_S):
        assert [place for place, _ in await anext(judging)] == [0]
        await started.wait()
        await judging.aclose()
    assert ended.is_set()


async def test_outside_judges_are_made_once_and_closed():
    table = Table()
    judges = RewardJudges(HandSandbox(), table())
    rewards = [parse_reward(each) for each in ("math", SCORE, SERVICE, {"all": [SERVICE, "math", "code"]}, NEEDS)]
    judges.prepare(rewards)
    assert list(table.judges) == [parse_reward(each).text for each in (SERVICE, "code", NEEDS)]
    async for _ in judges.judge_all([(rewards[3], Candidate("a", {}))]):
        pass
    await judges.aclose()
    assert [judge.closed for judge in table.judges.values()] == [1, 1, 1]


async def test_nothing_is_judged_of_nothing():
    sandbox = HandSandbox()
    assert await judged([], sandbox=sandbox) == []
    assert sandbox.calls == []
