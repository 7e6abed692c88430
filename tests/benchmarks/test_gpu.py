"""The benchmark on GPUs: it runs on the CPU at toy size, and counts operations as its sources do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.learner.gpu.flops import PEAKS, peak_flops, step_flops
from benchmarks.learner.gpu.parts import PartFailedError, apart
from benchmarks.learner.gpu.workload import SHAPES, Load
from learner.model.shape import model_shape
from services.settings import ModelSettings

ROOT = Path(__file__).parents[2]
TOY = "--layers 2 --hidden 128 --vocabulary 512 --groups 2 --group-size 2 --prompt-tokens 8 --response-tokens 17"
TOKENS = 2 * 2 * (8 + 16)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.learner.gpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_it_runs_on_the_cpu_at_toy_size(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--device", "cpu", "--sizes", "0.5b", "--stages", "3", "--micro-batch-tokens", "64", *TOY.split()]
    finished = run(*sizes, "--steps", "1", "--broadcast-mib", "1", "--json", str(out))
    assert finished.returncode == 0, finished.stderr
    found = json.loads(out.read_text())
    [row] = found["models"]["0.5b"]["stages"]
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(TOKENS)
    flops = step_flops(SHAPES["0.5b"].reduced(2, 128, 512), row["parameters"], Load(2, 2, 8, 17))
    assert row["flops_per_second"] * row["step_seconds"] == pytest.approx(flops)
    assert (row["mfu"], row["peak_bytes"], found["peak_flops"], found["failures"]) == (None, 0, None, [])
    assert min(row["planned_bytes"], row["snapshot_bytes_per_second"], found["broadcast"]["bytes_per_second"]) > 0
    assert sorted(map(int, found["models"]["0.5b"]["head_seconds"])) == [128, 256, 512, 1024, 2048]
    assert re.search(r"^\| \d{4}-\d\d-\d\d \| cpu, .*tokens/s, MFU -, ", finished.stdout, re.M)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may find a device")
def test_without_a_device_it_says_so_with_status_2() -> None:
    finished = run()
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "no CUDA device" in finished.stderr


@pytest.mark.parametrize(("size", "parameters"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304)])
def test_the_shapes_are_those_of_qwen(size: str, parameters: int, tmp_path: Path) -> None:
    """The numbers of parameters that the published checkpoints have."""
    SHAPES[size].config.save_pretrained(tmp_path)
    assert model_shape(ModelSettings(path=str(tmp_path)), tmp_path).parameters == parameters


def doubled(value: int) -> int:
    """Work for a process of its own."""
    if value < 0:
        raise ValueError("negative")
    if value == 0:
        os._exit(3)
    return 2 * value


@pytest.mark.slow
def test_a_part_fails_alone() -> None:
    assert apart(doubled, 4) == 8
    with pytest.raises(PartFailedError, match="ValueError: negative"):
        apart(doubled, -1)
    with pytest.raises(PartFailedError, match="its process died"):
        apart(doubled, 0)


def test_operations_by_hand() -> None:
    """Per token 6 for each parameter, and 12 x layers x width x row for attention; the head only for its tokens."""
    shape, load = SHAPES["0.5b"], Load(groups=1, size=2, prompt=4, response=5)
    embedding, others = 151_936 * 896, 1000
    inputs = 2 * 8 * (6 * others + 12 * 24 * 896 * 8)
    assert step_flops(shape, embedding + others, load) == inputs + 2 * 5 * 6 * embedding


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device(name: str, tera: float | None) -> None:
    found = peak_flops(name)
    assert (found and found[0]) == (tera and tera * 1e12)
    assert all(source for _, _, source in PEAKS)
