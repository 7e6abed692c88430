"""Owns the rollout steps that are measured: the demo's, and longer responses of one length or of a long tail.

Must not measure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from transformers import AutoConfig

from benchmarks.learner.gpu.workload import Shape, drawn_step
from services.contracts import Batch
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload

DEMO = Path(__file__).parents[3] / "deploy" / "recipes" / "smollm2-chain-sum.yaml"
SIGMA = 1.0
"""Of the logarithm of a response's length, where it is log-normal."""


@dataclass(frozen=True)
class Work:
    """A rollout step: groups of `size` responses, prompts of `prompt` tokens, mini-batches of `mini` groups.

    `shortest`, `longest`: tokens of a response. `median`: that of a log-normal length, which is cut at these bounds;
    None: every length between them is as likely. `budget`: tokens of a micro-batch.
    """

    name: str
    groups: int
    size: int
    prompt: int
    shortest: int
    longest: int
    budget: int
    mini: int
    median: float | None = None

    def lengths(self, seed: int) -> list[list[int]]:
        """Tokens of each response, by group."""
        draw, shape = np.random.default_rng(seed), (self.groups, self.size)
        if self.median is None:
            return [list(map(int, row)) for row in draw.integers(self.shortest, self.longest + 1, shape)]
        drawn = np.exp(np.log(self.median) + SIGMA * draw.standard_normal(shape))
        return [list(map(int, row)) for row in drawn.round().clip(self.shortest, self.longest)]

    def step(self, vocabulary: int, seed: int) -> tuple[Batch, dict[str, SamplePayload]]:
        """The step with the lengths of `seed`."""
        return drawn_step(self.lengths(seed), self.prompt, vocabulary, seed)

    @property
    def rows(self) -> int:
        """Responses that fit into a micro-batch of a loop that does not know their lengths in advance."""
        return max(1, self.budget // (self.prompt + self.longest - 1))

    @property
    def first(self) -> Work:
        """One mini-batch of it."""
        return replace(self, groups=self.mini)


PADDED_ROWS = 8
"""Responses of a padded micro-batch with lengths of a long tail: one group."""
WORKS = {
    "demo": Work("demo", 8, 8, 46, 8, 24, 1024, 4),
    "uniform": Work("uniform", 2, 8, 46, 96, 96, 2048, 2),
    "log-normal": Work("log-normal", 4, 8, 46, 4, 320, PADDED_ROWS * (46 + 320 - 1), 4, median=56.0),
}


def recipe_of(folder: Path, work: Work, threads: int) -> Recipe:
    """The demo's recipe with the model in `folder`, the sizes of `work`, and so many threads for the learner."""
    document = yaml.safe_load(DEMO.read_text())
    longest = max(work.longest, document["algorithm"]["overlong"]["cache"] + 1)
    document["model"] = {"path": str(folder), "max_model_len": work.prompt + longest}
    document["algorithm"]["group_size"] = work.size
    document["rollout"]["max_new_tokens"] = longest
    document["rollout"].pop("max_sequences")
    document["learner"] |= {"micro_batch_tokens": work.budget, "mini_batch_groups": work.mini, "threads": threads}
    document["limits"]["groups_per_step"] = work.groups
    return parse_recipe(document)


def shape_of(folder: Path) -> Shape:
    """The sizes of a Llama in a Hugging Face folder."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
    )
