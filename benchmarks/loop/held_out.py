"""Owns the held-out accuracy of saved weights, by one program with one sampling and one judge.

Must not be timed. Run as a program:

    python -m benchmarks.loop.held_out HELD_OUT.json --out FILE.json FOLDER...

HELD_OUT.json is that of benchmarks.peers.trl.problems: the questions, and the sampling of the recipe's evaluation. Each
FOLDER is a Hugging Face model. transformers draws the responses in float32, with the same seed for every folder, and
the verifier of reasoning-gym judges them. FILE.json gets avg@k by folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verifier.verifiers.reasoning_gym import judge

AT_ONCE = 16
"""Questions whose responses are drawn together."""


def accuracy_of(folder: Path, problems: Sequence[dict[str, Any]], sampling: dict[str, Any], seed: int = 0) -> float:
    """avg@k of the model in `folder`, on problems with `messages` and `reference`; k is `samples` of `sampling`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found: list[float] = []
    for start in range(0, len(problems), AT_ONCE):
        part = problems[start : start + AT_ONCE]
        chats = tokenizer.apply_chat_template(
            [problem["messages"] for problem in part],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            drawn = model.generate(
                **chats,
                do_sample=True,
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=0,
                max_new_tokens=sampling["max_new_tokens"],
                num_return_sequences=sampling["samples"],
            )
        texts = tokenizer.batch_decode(drawn[:, chats["input_ids"].shape[1] :], skip_special_tokens=True)
        found += _judged(texts, part)
    return fmean(found)


def _judged(texts: Sequence[str], problems: Sequence[dict[str, Any]]) -> list[float]:
    """1 or 0 for each text; the problems have equally many in a row."""
    each = len(texts) // len(problems)
    return [float(judge(text, problems[number // each]["reference"], {}).correct) for number, text in enumerate(texts)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop.held_out", description=__doc__)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    document = json.loads(given.held_out.read_text())
    found = {}
    for folder in given.folders:
        found[str(folder)] = accuracy_of(folder, document["problems"], document["sampling"])
        print(f"{folder}: {found[str(folder)]:.3f}", flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
