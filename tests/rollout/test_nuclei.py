"""Nuclei are read from the engine's log-probs, and an answer from which they cannot be read is an error."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rollout.engine import EngineError, generation_of
from rollout.nuclei import WideNucleusError

NOTHING = -math.inf
THIRD = math.log(1 / 3)
# The sampled token, then the three likeliest of a vocabulary of 50: two tokens in the first nucleus, one in the second.
IDS = [7, 7, 4, 9, 8, 8, 3, 1]
LOGPROBS = [math.log(0.75), math.log(0.75), math.log(0.25), NOTHING, 0.0, 0.0, NOTHING, NOTHING]


def answer(ids=IDS, logprobs=LOGPROBS, tokens=(7, 8)):
    return SimpleNamespace(
        finish_reason="length",
        token_ids=list(tokens),
        logprobs=SimpleNamespace(token_ids=list(ids), logprobs=list(logprobs)),
        weight_versions=[SimpleNamespace(version="3", start=0, end=len(tokens))],
    )


def test_nuclei_have_the_tokens_of_probability_above_0():
    found = generation_of(answer(), "r", 50)
    assert found.nuclei is not None
    assert (found.nuclei.ids.tolist(), found.nuclei.offsets.tolist()) == ([7, 4, 8], [0, 2, 3])
    np.testing.assert_allclose(found.behaviour_logprobs, [math.log(0.75), 0.0], rtol=1e-6)
    assert found.response_ids.tolist() == [7, 8]


def test_without_further_columns_there_are_no_nuclei():
    found = generation_of(answer([7, 8], [-1.5, -0.5]), "r", 50)
    assert (found.nuclei, found.behaviour_logprobs.tolist()) == (None, [-1.5, -0.5])


def test_a_nucleus_may_be_the_whole_vocabulary():
    found = generation_of(answer([1, 0, 1, 2], 4 * [THIRD], (1,)), "r", 3)
    assert found.nuclei is not None
    assert found.nuclei.ids.tolist() == [0, 1, 2]


def test_a_nucleus_as_wide_as_its_columns_is_not_taken():
    """Of four tokens with the same logit three were requested; the fourth cannot be told from a token outside."""
    with pytest.raises(WideNucleusError, match="a nucleus has more than 2 tokens"):
        generation_of(answer([1, 0, 1, 2, *IDS[4:]], [*4 * [math.log(0.25)], *LOGPROBS[4:]], (1, 8)), "r", 50)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logprobs": [0.0, -0.9, -2.0, NOTHING, *LOGPROBS[4:]]}, r"probabilities that miss 1 by 0\.\d+ are not valid"),
        ({"ids": [7, 5, 4, 9, 8, 8, 3, 1]}, "that of token 0 is not valid: expected the drawn token in it"),
        ({"ids": [6, 7, 4, 9, 8, 8, 3, 1]}, "its log-probs belong to other tokens"),
        ({"logprobs": [math.nan, *LOGPROBS[1:]]}, "a log-prob that is not finite"),
        ({"ids": IDS[:-1], "logprobs": LOGPROBS[:-1]}, "request r failed: cannot reshape"),
    ],
)
def test_an_answer_without_whole_nuclei_is_an_error(changed, message):
    with pytest.raises(EngineError, match=message):
        generation_of(answer(**changed), "r", 50)
