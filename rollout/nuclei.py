"""Owns the reading of nuclei from the log-probs that the engine returns with each token.

Must not import vLLM. vLLM 0.32 can also return the nuclei themselves (`return_sampling_mask`), but only with its second
model runner, which needs Triton; docs/dapo.md has what was tried. Its log-probs are those of the nucleus everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.streams.delivery.nucleus import Nuclei


class WideNucleusError(ValueError):
    """More tokens have the same logit, at the edge of a nucleus, than were requested."""


ROUNDING = 1e-3
"""How far the probabilities of a nucleus may be from 1 in sum; in float32 they are by less than 1e-6."""


def nuclei_of(ids: NDArray[np.int32], logprobs: NDArray[np.float32], vocabulary: int) -> Nuclei:
    """The nuclei of T tokens from the likeliest tokens [T, columns] of their distributions, and their log-probs.

    Outside its nucleus a token has probability 0. Raises WideNucleusError if a nucleus may have more tokens than
    columns, ValueError if the probabilities in it do not add up to 1.
    """
    inside = np.isfinite(logprobs)
    columns = ids.shape[1]
    if columns < vocabulary and inside[:, -1].any():
        raise WideNucleusError(f"a nucleus has more than {columns - 1} tokens: too many equal logits for its top-k")
    mass = np.exp(logprobs, where=inside, out=np.zeros_like(logprobs)).sum(1)
    worst = float(np.abs(mass - 1).max(initial=0))
    if not worst <= ROUNDING:
        raise ValueError(
            f"nuclei: probabilities that miss 1 by {worst:.2g} are not valid: expected at most {ROUNDING:g}"
        )
    return Nuclei(ids[inside], np.concatenate([[0], np.cumsum(inside.sum(1))]).astype(np.int32))
