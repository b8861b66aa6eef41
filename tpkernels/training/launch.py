"""Starts ranks as processes of this machine with torchrun's environment; reports the first that fails.

torchrun's engine, `torch.distributed.launcher.api.elastic_launch`, is not used, because its stores are open
to other machines: with torch 2.13 `ss -ltnp` shows `*:PORT` in spite of `rdzv_endpoint="127.0.0.1:0"`, two
ports of `rdzv_backend="c10d"` and one of "static".
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from tpkernels.gate.child import ending

LIFELINE = "TPKERNELS_LIFELINE"  # a pipe that ends with the launcher
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
EXIT_SECONDS = 120.0  # for the threads of backends to end after a rank's work
POLL_SECONDS = 0.05


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run `command` once for each rank; return the exit code, 0 if all ranks succeeded.

    The first rank that fails is named, and the others are ended, as by Ctrl-C. SIGTERM is passed on. Ranks
    that call `hold_lifeline` end with this process even if it is killed.
    """
    store = loopback_store()
    common = environment_of_ranks(store, ranks)
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: _pass_on(processes))
    theirs, ours = os.pipe()
    common[LIFELINE] = str(theirs)
    try:
        for rank in range(ranks):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(list(command), env=environment, pass_fds=[theirs]))
        failed = _first_failure(processes)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _end(processes)
        os.close(theirs)
        os.close(ours)
    if failed is None:
        return 0
    code = processes[failed].returncode
    how = "was killed" if code < 0 else "ended"
    sys.stderr.write(f"\nrank {failed} {how} {ending(code)}; the other ranks were ended\n")
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
    if LIFELINE in os.environ:
        descriptor = int(os.environ[LIFELINE])
        threading.Thread(target=_exit_with, args=(descriptor,), daemon=True).start()
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has no such pipe
        threading.Thread(target=_exit_without, args=(os.getppid(),), daemon=True).start()


def exit_in_time() -> None:
    """Limit this process's exit to `EXIT_SECONDS`; after that print where it hangs, and fail."""
    atexit.register(faulthandler.dump_traceback_later, EXIT_SECONDS, exit=True)


def _exit_with(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written
    os._exit(1)


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that fails first, or None once all have succeeded."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(POLL_SECONDS)


def _pass_on(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    _pass_on(processes)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
