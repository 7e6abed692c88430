"""Owns the command `python -m benchmarks.learner.gpu`: its options, its table and its JSON.

Must not measure. Exit status 1: a part failed, 2: there is no device of the requested kind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.gpu.flops import peak_flops
from benchmarks.learner.gpu.parts import (
    PartFailedError,
    apart,
    broadcast_rate,
    head_seconds,
)
from benchmarks.learner.gpu.trained import device_name, measured, quiet
from benchmarks.learner.gpu.workload import SHAPES, write_model

NO_DEVICE = 2


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 3])
    parser.add_argument("--groups", type=int, default=16, help="of a rollout step, in one optimizer step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1537, help="of each response")
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    parser.add_argument("--steps", type=int, default=3, help="that are measured, after one that warms up")
    parser.add_argument("--layers", type=int, help="instead of the shape's, to try the command on a small machine")
    parser.add_argument("--hidden", type=int, help="likewise")
    parser.add_argument("--vocabulary", type=int, help="likewise")
    parser.add_argument("--broadcast-mib", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="where the figures are written")
    return parser.parse_args(arguments)


def figures(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured; a part that fails is printed, and listed in `failures`."""
    device = torch.device("cuda:0" if options.device == "cuda" else options.device)
    failures = list[str]()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(device),
        "torch": torch.__version__,
        "peak_flops": peak_flops(device_name(device)),
        "options": {name: str(value) for name, value in vars(options).items()},
        "models": {},
        "failures": failures,
    }
    for size in options.sizes:
        shape = SHAPES[size].reduced(options.layers, options.hidden, options.vocabulary)
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), shape, device)
            stages = []
            for stage in options.stages:
                try:
                    stages.append(apart(measured, Path(folder), shape, stage, options))
                except PartFailedError as error:
                    failures.append(f"{size}, ZeRO {stage}: {error}")
                    print(f"failed: {failures[-1]}", file=sys.stderr, flush=True)
        head = head_seconds(shape, options.micro_batch_tokens, device, options.steps)
        found["models"][size] = {"stages": stages, "head_seconds": head}
        print_model(size, found["models"][size], options.micro_batch_tokens)
    backend = "gloo" if options.device == "cpu" else "nccl"
    found["broadcast"] = None
    if options.device == "cpu" or torch.cuda.device_count() > 1:
        rate = broadcast_rate(backend, options.broadcast_mib << 20, options.steps)
        found["broadcast"] = {"backend": backend, "bytes_per_second": rate}
    return found


def print_model(size: str, found: dict[str, Any], tokens: int) -> None:
    """Print the rows of one model."""
    for row in found["stages"]:
        mfu = f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else "device not in the table of peaks, no MFU"
        measured, planned = row["peak_bytes"] / 2**30, row["planned_bytes"] / 2**30
        memory = f"peak {measured:.1f} GiB, {measured / planned:.2f} of the plan" if measured else "peak not measured"
        print(
            f"{size} ({row['parameters'] / 1e9:.3f} billion), ZeRO {row['stage']}: step {row['step_seconds']:.3f} s, "
            f"{row['tokens_per_second']:,.0f} tokens/s, {row['flops_per_second'] / 1e12:.3g} TFLOP/s, {mfu}; "
            f"{memory} ({planned:.1f} GiB); to the host {row['snapshot_bytes_per_second'] / 1e9:.2f} GB/s",
            flush=True,
        )
    head = ", ".join(f"{chunk}: {seconds * 1e3:.1f} ms" for chunk, seconds in found["head_seconds"].items())
    print(f"{size}: head, both passes over {tokens:,} tokens, by tokens per chunk: {head}", flush=True)


def print_table_row(found: dict[str, Any]) -> None:
    """Print rows for the table in docs/performance.md."""
    reduced = any(found["options"][name] != "None" for name in ("layers", "hidden", "vocabulary"))
    print("\nof a reduced shape:" if reduced else "\nfor docs/performance.md:")
    for size, model in found["models"].items():
        for row in model["stages"]:
            mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
            text = f"{size}, ZeRO {row['stage']}: {row['tokens_per_second']:,.0f} tokens/s, MFU {mfu}, "
            text += f"{row['peak_bytes'] / 2**30:.1f} GiB of {row['planned_bytes'] / 2**30:.1f} planned"
            print(f"| {found['date']} | {found['device']} | {text} |")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    options = options_of(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} finds none; nothing was measured", file=sys.stderr)
        return NO_DEVICE
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet()
    found = figures(options)
    if found["broadcast"]:
        rate, backend = found["broadcast"]["bytes_per_second"] / 1e9, found["broadcast"]["backend"]
        print(f"broadcast ({backend}): {rate:.2f} GB/s from the host to one receiver")
    else:
        print("broadcast: not measured, needs two devices")
    print_table_row(found)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {options.json}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
