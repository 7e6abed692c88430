"""A whole run whose model and data are on a gated hub; its services are offline and without the token."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.harness.servers.hub_server import TOKEN, HubServer, files_of
from tests.harness.small_run import recipe_document
from tests.harness.stack import Stack, _title

SERVICES = ("ServeReplica", "EngineCore", "Hosted")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("ray")
def test_a_run_from_a_gated_hub(hub: HubServer, redis_url: str, tiny_model: Path, tmp_path: Path) -> None:
    repository = hub.model("org/tiny", files_of(tiny_model))
    repository.gated = True
    rows = [{"question": f"{n} + 1?", "verifier": "math", "reference": {"answer": str(n + 1)}} for n in range(40)]
    data = hub.dataset("org/sums", {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()})
    source = {"source": "jsonl", "path": "org/sums@main/train.jsonl", "train": 32, "held_out": 8}
    document = recipe_document("org/tiny@main", verifier={"cpus": 0.0}, limits={"rollout_steps": 2})
    document["data"] = source
    document["algorithm"]["dynamic_sampling"] = {"enabled": False}
    with Stack(tmp_path / "stack", redis_url, {"HF_TOKEN": TOKEN}) as stack:
        run = stack.submit(document)
        stack.until(run, lambda view: view["state"] == "running", "the run to start")
        titles = {process.pid: _title(process) for process in stack.below()}
        services = [pid for pid, title in titles.items() if any(name in title for name in SERVICES)]
        assert services, titles
        for pid in services:
            assert TOKEN not in psutil.Process(pid).environ().values(), titles[pid]
        view = stack.until(run, lambda view: view["state"] == "succeeded", "the end of the run")
    facts = json.loads((stack.folder / run / "run.json").read_text())
    assert facts["model_path"].startswith(f"hf://org/tiny@{repository.branches['main']}#")
    assert facts["inputs"][source["path"]].startswith(f"hf://datasets/org/sums@{data.branches['main']}/train.jsonl#")
    assert facts["recipe"]["model"]["path"] == "org/tiny@main"
    downloaded = [event["text"] for event in view["events"] if event["phase"] == "downloaded"]
    assert downloaded in ([], [facts["model_path"], *facts["inputs"].values()]), "the view shows the last events"
    texts = [path.read_text(errors="replace") for path in stack.folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if TOKEN in text]
    assert not hub.leaked
