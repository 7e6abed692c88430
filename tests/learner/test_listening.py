"""What the ranks and the weight broadcast listen on: the advertised host, never every interface."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta

import psutil
import torch

from learner.training.process_group import served_store
from learner.weight_sync.broadcast import Rendezvous
from rollout.channel import Channel
from tests.harness.free_ports import free_port
from tests.learner.running import ROOT

DEADLINE_S = 30.0
RANK = """
import json, sys
import psutil, torch
import torch.distributed as dist
from learner.training.process_group import Ranks, end_with

def work():
    ranks = Ranks(int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2]), timeout_s=60, meet_s=100)
    dist.new_group(backend="gloo")  # as DeepSpeed does
    sockets = [found.laddr.ip for found in psutil.Process().net_connections() if found.status == psutil.CONN_LISTEN]
    print(json.dumps(sockets), flush=True)
    ranks.all_reduce(torch.zeros(1))  # the other rank has looked as well
    ranks.leave()
    return 0

end_with(work)
"""


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections()
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_served_store_is_bound_to_its_host() -> None:
    before = listening()
    store = served_store("127.0.0.2", 0, timedelta(seconds=DEADLINE_S))
    assert listening() - before == {("127.0.0.2", store.port)}
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_weight_broadcast_listens_on_its_host_alone() -> None:
    before = listening()
    rendezvous = Rendezvous("127.0.0.1", "gloo", DEADLINE_S)
    sender = rendezvous.group(1, 2)
    receiver = Channel("gloo", 1, 1, 2, DEADLINE_S, torch.device("cpu"))
    joining = threading.Thread(target=receiver.join, args=("127.0.0.1", rendezvous.port), daemon=True)
    joining.start()
    sender.form()
    joining.join(DEADLINE_S)
    found = listening() - before
    sender.abort()
    receiver.abort()
    assert len(found) >= 3, "the store, and one socket of each member"
    assert {host for host, _ in found} == {"127.0.0.1"}


def test_two_ranks_listen_on_their_host_alone() -> None:
    port = free_port()
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=150)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(found)
    assert {host for hosts in found for host in hosts} == {"127.0.0.1"}
    assert [rank.returncode for rank in ranks] == [0, 0]
