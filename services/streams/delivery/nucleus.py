"""Owns the nuclei of a response: for each token, the tokens of the vocabulary that it was drawn from.

Must not know how they are stored or trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Nuclei:
    """What top-k and top-p left of the vocabulary at each of T positions.

    ids: int32 [M], the token ids of all nuclei, one after the other; offsets: int32 [T + 1]. The nucleus of token t is
    ids[offsets[t] : offsets[t + 1]], in any order.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def check(self, response_ids: NDArray[np.int32]) -> None:
        """Raise ValueError unless every token of the response is in its own nucleus, and the ids are token ids."""
        tokens, offsets = len(response_ids), self.offsets
        if len(offsets) != tokens + 1:
            raise ValueError(f"nuclei: {len(offsets) - 1} are not valid: expected {tokens}, one per response token")
        sizes = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(self.ids) or (sizes < 1).any():
            raise ValueError(f"nuclei: these offsets are not valid: expected {len(self.ids)} ids, at least 1 per token")
        if (self.ids < 0).any():
            raise ValueError(f"nuclei: the id {self.ids.min()} is not valid: expected a token id")
        own = self.ids == np.repeat(response_ids, sizes)
        if tokens and (wrong := np.add.reduceat(own, offsets[:-1], dtype=np.int32) != 1).any():
            raise ValueError(
                f"nuclei: that of token {wrong.argmax()} is not valid: expected the drawn token in it, once"
            )

    def padded(self) -> NDArray[np.int32]:
        """The nuclei as rows of one array, int32 [T, longest]; -1 pads the shorter ones."""
        sizes = np.diff(self.offsets)
        rows = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int32)
        rows[np.arange(rows.shape[1]) < sizes[:, None]] = self.ids
        return rows


def joined(parts: list[Nuclei]) -> Nuclei:
    """The nuclei of several responses, one after the other."""
    sizes = [np.diff(part.offsets) for part in parts]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int32), *sizes]))]).astype(np.int32)
    return Nuclei(np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]), offsets)
