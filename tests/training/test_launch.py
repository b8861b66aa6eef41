"""What the launcher gives its ranks: a store and an interface that other machines cannot reach."""

import json
import signal
import socket
import sys

import pytest

from tpkernels.training.launch import loopback_store, run_ranks

TELL = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """What each rank of a run finds."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it stays the test's own

    def find(ranks):
        assert run_ranks([sys.executable, "-c", TELL, str(tmp_path / "rank-")], ranks) == 0
        return [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(ranks)]

    return find


def test_gloo_of_ranks_on_this_machine_listens_on_loopback_only(environments, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    assert {found["GLOO_SOCKET_IFNAME"] for found in environments(2)} == loopback


def test_interface_that_the_user_chose_stays(environments, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert [found["GLOO_SOCKET_IFNAME"] for found in environments(2)] == ["eth7", "eth7"]


def test_store_is_reached_by_this_machine_alone():
    store = loopback_store()
    store.set("key", "value")
    with socket.create_connection(("127.0.0.1", store.port)):
        pass
    # a socket bound to every address would hold this port, too
    with socket.create_server(("127.0.0.2", store.port)):
        pass
    assert store.get("key") == b"value"
