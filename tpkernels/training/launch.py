"""Starts ranks as torchrun starts them, on this machine alone, and joins them into a world.

The processes are torchrun's own, its rendezvous is not, because its stores are open to other machines: with
torch 2.13 `ss -ltnp` shows `*:PORT` in spite of `rdzv_endpoint="127.0.0.1:0"`, two ports of
`rdzv_backend="c10d"` and one of "static".
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

EXIT_SECONDS = 120.0  # for the threads of backends to end after a rank's work
POLL_SECONDS = 0.05
GRACE_SECONDS = 10  # for ranks to end after Ctrl-C
SAVE_SECONDS = 10**6  # for ranks to save after SIGTERM, as long as it takes


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run `command` once for each rank; return the exit code, 0 if all ranks succeeded.

    The first rank that fails is named, and the others are ended, as by Ctrl-C. SIGTERM is passed on. Ranks
    that call `hold_lifeline` end with this process even if it is killed.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are named below
    store = loopback_store()
    common = environment_of_ranks(store, ranks)
    with TemporaryDirectory() as folder:  # torch requires one
        processes = start_processes(
            name="tpkernels",
            entrypoint=command[0],
            args=dict.fromkeys(range(ranks), tuple(command[1:])),
            envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(folder),
        )
        try:
            result = processes.wait(period=POLL_SECONDS)
        except SignalException as received:
            is_interrupt = received.sigval == signal.SIGINT
            processes.close(signal.SIGTERM, GRACE_SECONDS if is_interrupt else SAVE_SECONDS)
            if is_interrupt:
                return 128 + signal.SIGINT
            result = processes.wait(0)
    assert result is not None, "no process is left"
    if not result.is_failed():
        return 0
    rank, failure = next(iter(result.failures.items()))  # those that were ended follow
    code = failure.exitcode
    how = f"was killed by {failure.signal_name()}" if code < 0 else f"ended with exit code {code}"
    sys.stderr.write(f"\nrank {rank} {how}; the other ranks were ended\n")
    return code if code > 0 else 128 - code


def environment_of_ranks(store: TCPStore, ranks: int) -> dict[str, str]:
    """Return the environment variables that all ranks share; each also needs its RANK and LOCAL_RANK.

    store: the ranks find it as they find torchrun's
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tpkernels",
    }
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # ranks share the cores
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _loopback_interface()):
        common["GLOO_SOCKET_IFNAME"] = interface  # otherwise gloo listens on the address of the host's name
    return common


def loopback_store() -> TCPStore:
    """Return a store for the ranks of this machine that other machines cannot reach."""
    # given a name and a port, TCPStore listens on every interface
    listening = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=listening.detach(),  # the store closes it
    )


def _loopback_interface() -> str:
    """Return the loopback interface: lo on Linux, lo0 elsewhere; "" if there is neither."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")


def device_of_rank() -> torch.device:
    """Return this process's GPU, made current, by its local rank; the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(backend: str, timeout: timedelta | None = None) -> None:
    """As `init_process_group(backend)`, also in a process that torchrun has restarted.

    A restarted process does not connect to processes of an earlier attempt.

    timeout: of each collective; by default the backend's own
    """
    store, rank, size = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun keeps its store over restarts, with addresses of dead processes. On several machines each
        # counts its own restarts, so the number cannot identify an attempt.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def hold_lifeline() -> None:
    """End this process when its launcher ends, for any reason."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_exit_without, args=(os.getppid(),), daemon=True).start()


def exit_in_time() -> None:
    """Limit this process's exit to `EXIT_SECONDS`; after that print where it hangs, and fail."""
    atexit.register(faulthandler.dump_traceback_later, EXIT_SECONDS, exit=True)


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
