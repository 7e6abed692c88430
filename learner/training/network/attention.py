"""Owns attention within rows of different lengths that lie end to end, where responses of a group share their prompt.

Must not know batches or losses. transformers' models call it in place of their own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

NAME = "rows_end_to_end"
"""What `attn_implementation` is while a model attends in rows."""

Rows = Sequence[Sequence[int]]
"""The lengths of each row, end to end: its prompt, with the response if there is only one, and the responses that
attend to the prompt, themselves, and nothing else. All are positive, and together they are the tokens of a batch of
one."""


def attend(causal_lm: Any, implementation: str) -> bool:
    """Have a Hugging Face model use an attention from now on: NAME or one of transformers. Returns whether it does."""
    AttentionInterface.register(NAME, _attention)
    if causal_lm.config._attn_implementation != implementation:
        causal_lm.set_attn_implementation(implementation)
    return bool(causal_lm.config._attn_implementation == implementation)


@dataclass(frozen=True)
class RowsAttended:
    """The rows of a batch, and the additive mask [longest, 2 longest] of which each response takes a part."""

    lengths: Rows
    mask: Tensor

    @classmethod
    def of(cls, lengths: Rows, dtype: torch.dtype, device: torch.device) -> RowsAttended:
        """With a mask in which token i attends to the first longest + i + 1."""
        longest = max((length for row in lengths for length in row if len(row) > 1), default=1)
        mask = torch.full((longest, 2 * longest), -torch.inf, dtype=dtype, device=device)
        return cls(lengths, mask.triu_(longest + 1))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: RowsAttended,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of query [1, H, L, D] to key and value [1, K, L, D]; returns [1, L, H, D].

    `attention_mask` is None: transformers makes none for an attention that it does not know.
    """
    repeats = query.shape[1] // key.shape[1]
    lengths = [length for row in rows.lengths for length in row]
    # Split, and not sliced: the gradient of a slice is as long as all rows.
    parts = (part.split(lengths, dim=2) for part in (query, repeat_kv(key, repeats), repeat_kv(value, repeats)))
    segments, found = zip(*parts, strict=True), []
    for row in rows.lengths:
        queries, *prompt = next(segments)
        found.append(_attend(queries, *prompt, mask=rows.mask, window=sliding_window, scaling=scaling))
        for _response in row[1:]:
            queries, *own = next(segments)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(prompt, own, strict=True))
            found.append(_attend(queries, keys, values, mask=rows.mask, window=sliding_window, scaling=scaling))
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """Attention of the last tokens, [1, H, n, D], to all, [1, H, N, D], none later than itself."""
    new, total = query.shape[2], key.shape[2]
    if window is not None and window < total:
        part = _in_window(new, total, window, query.device)
    elif new == total:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        start = len(mask) - (total - new)
        part = mask[:new, start : start + total].to(query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=part, scale=scaling)


def _in_window(new: int, total: int, window: int, device: torch.device) -> Tensor:
    """Which of `total` tokens the last `new` attend to, bool [new, total]: `window` of them, themselves included."""
    back = torch.arange(total - new, total, device=device).unsqueeze(1) - torch.arange(total, device=device)
    return (back >= 0) & (back < window)
