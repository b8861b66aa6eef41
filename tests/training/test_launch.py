"""What the launcher gives its ranks, and what ranks that torchrun has restarted do not see."""

import json
import signal
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.patience import patient
from tpkernels.training.launch import device_of_rank, join_world, loopback_store, run_ranks

TELL = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"


@pytest.fixture(autouse=True)
def _same_handlers(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # they stay the test's own


def run(program, *arguments):
    return run_ranks([sys.executable, "-c", program, *map(str, arguments)], 2)


def test_gloo_listens_on_loopback_only_unless_the_user_chose_an_interface(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    for name in (*loopback, "eth7"):
        assert run(TELL, tmp_path / "rank-") == 0
        found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        assert [one["GLOO_SOCKET_IFNAME"] for one in found] == [name] * 2
        assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == ["0", "1"]
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")


FAILS = "import os, time; exec(os.environ['RANK'] == '1' and {!r} or 'time.sleep(100)')"


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("raise SystemExit(7)", 7, "rank 1 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_rank_that_fails_is_named_and_the_others_are_ended(fault, code, said, capfd):
    assert run(FAILS.format(fault)) == code
    told = capfd.readouterr().err.splitlines()  # with what threads of other tests say meanwhile
    assert [line for line in told if "rank" in line] == [f"{said}; the other ranks were ended"]


def test_store_is_reached_by_this_machine_alone():
    store = loopback_store()
    store.set("key", "value")
    with socket.create_connection(("127.0.0.1", store.port)):
        pass
    # a socket bound to every address would hold this port, too
    with socket.create_server(("127.0.0.2", store.port)):
        pass
    assert store.get("key") == b"value"


@pytest.mark.parametrize(("visible", "taken"), [(8, 5), (1, 0)])
def test_a_rank_takes_its_gpu_of_all_or_the_one_that_it_sees(visible, taken, monkeypatch):
    current = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [device_of_rank()] == current == [torch.device("cuda", taken)]


@pytest.fixture
def joined_store(monkeypatch):
    """A way to join in some environment, that gives the store which torch was handed."""
    shared, handed = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(shared, 1, 2)]))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, *, store, **options: handed.append((store, options))
    )

    def join(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        join_world("gloo")
        store, options = handed.pop()
        assert options == {"rank": 1, "world_size": 2, "timeout": None}
        return store

    return join


def test_attempts_on_one_machine_are_told_apart_and_on_several_nothing_is_assumed(joined_store):
    first = joined_store(TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="1")
    first.set("address of rank 0", "dead")
    second = joined_store(TORCHELASTIC_RESTART_COUNT="1")
    assert not second.check(["address of rank 0"])
    second.set("address of rank 0", "alive")
    assert joined_store().get("address of rank 0") == b"alive"  # every rank of an attempt meets the others
    # each counts the restarts of its own ranks
    first = joined_store(TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="2")
    first.set("from one machine", "here")
    assert joined_store(TORCHELASTIC_RESTART_COUNT="1").check(["from one machine"])


HANGS = """
import atexit, threading
from tpkernels.training import launch

atexit.register(threading.Event().wait)
launch.EXIT_SECONDS = 0.1
launch.exit_in_time()
print("all is done")
"""


def test_a_rank_that_hangs_at_its_exit_shows_where_and_fails():
    command = [sys.executable, "-c", HANGS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert (ended.returncode, ended.stdout) == (1, "all is done\n")
    assert ended.stderr.startswith("Timeout (0:00:00.100000)!")
    assert "threading.py" in ended.stderr
