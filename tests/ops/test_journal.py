"""What readers of the journal are told: profilers, logs, `explain`, `assert_overlapped`."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import profile

import tpkernels
from bench.streams.cases import all_programs
from tests.on_ranks import on_ranks
from tpkernels import journal
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends, log
from tpkernels.explanation import CallsRead, Explanation
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.row_linear import row_linear
from tpkernels.testing import HiddenTime, Running, assert_overlapped, hidden_time

FEATURES, MANY, FEW = 64, 2048, 8  # tokens of a rank: many are cut into chunks, few travel with a header


class Mlp(nn.Module):
    """Two layers of tensor parallelism, twice."""

    def __init__(self, overlap: bool = True) -> None:
        super().__init__()
        options = {"sequence_parallel": True, "overlap": overlap}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": tpkernels.ColumnParallelLinear(FEATURES, 128, gather_output=False, **options),
                    "down": tpkernels.RowParallelLinear(128, FEATURES, input_is_parallel=True, **options),
                }
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](functional.gelu(layer["up"](x)[0]))[0]  # type: ignore[index]
        return x


def model(overlap: bool = True) -> Mlp:
    tpkernels.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    return Mlp(overlap)


def numbers(split: bool, tokens: int) -> list[Tensor]:
    """Results and gradients of a column and a row."""
    torch.manual_seed(dist.get_rank())
    x, w, v = torch.randn(tokens, 16), torch.randn(12, 16), torch.randn(16, 12)
    for each in (x, w, v):
        each.requires_grad_()
    h = column_linear(x, w, None, dist.group.WORLD, activation="gelu", sequence_parallel=split)
    y = row_linear(h, v, None, dist.group.WORLD, sequence_parallel=split)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, w, v])]


@pytest.mark.parametrize("transport", ["c10d", "shared"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("tokens", [FEW, 4 * MANY])
@on_ranks(2)
def test_reading_the_journal_changes_no_bit(transport, split, tokens):
    with patch.object(select, "requested_transport", transport):
        expected = numbers(split, tokens)
        read = CallsRead({})
        with journal.read_by(read):
            found = numbers(split, tokens)
    assert all(map(torch.equal, found, expected))
    names = [call.name for call in read.calls]
    assert names == ["column_linear", "row_linear", "row_linear backward", "column_linear backward"]


@on_ranks(2)
def test_a_trace_names_ops_transfers_waits_and_products():
    column = model().layers[0]["up"]  # type: ignore[index]
    x = torch.randn(MANY, FEATURES)
    column(x)
    with profile() as trace:
        column(x)
    names = [re.sub(r"#\d+", "#N", event.name) for event in trace.events() if "tpkernels: " in event.name]
    what = f"#N column_linear: gather of x ({MANY}, {FEATURES}) torch.float32"
    assert {name: names.count(name) for name in names} == {
        "tpkernels: column_linear": 1,
        f"tpkernels: {what}, shared memory, 4 chunks": 1,
        f"tpkernels: wait for {what}": 6,  # of own rows, of each chunk, and at the end
        f"tpkernels: linear ({MANY}, {FEATURES}) (64, {FEATURES}) (64,) by torch": 1,  # of own rows
        f"tpkernels: linear ({MANY // 4}, {FEATURES}) (64, {FEATURES}) (64,) by torch": 4,
    }


@on_ranks(2)
def test_ranges_of_nvtx_are_nested():
    column, said = model().layers[0]["up"], []  # type: ignore[index]
    with (
        patch.object(torch.cuda.nvtx, "range_push", said.append),
        patch.object(torch.cuda.nvtx, "range_pop", lambda: said.append("end")),
        journal.read_by(journal.NvtxRanges()),
    ):
        column(torch.randn(FEW, FEATURES))
    assert said[0] == "tpkernels: column_linear"
    assert said[-1] == "end"
    assert said.count("end") * 2 == len(said)


@pytest.mark.parametrize(
    ("words", "nvtx", "kinds"),
    [
        ("", "0", []),
        ("choices", "0", []),
        ("calls", "0", ["Lines"]),
        ("choices,calls", "1", ["Lines", "NvtxRanges"]),
    ],
)
def test_the_environment_asks_for_readers(words, nvtx, kinds, monkeypatch):
    monkeypatch.setenv("TPKERNELS_LOG", words)
    monkeypatch.setenv("TPKERNELS_NVTX", nvtx)
    for logger in log.LOGS.values():
        for name, value in (("handlers", []), ("level", logging.NOTSET), ("propagate", True)):
            monkeypatch.setattr(logger, name, value)
    log.calls.manager._clear_cache()
    log.show_if_asked()
    found = log.readers_asked_for(backends.computing_on)
    log.calls.manager._clear_cache()
    assert [type(reader).__name__ for reader in found] == kinds


@on_ranks(2)
def test_a_line_of_the_log_for_each_transfer():
    mlp, lines = model(), list[str]()
    with journal.read_by(journal.Lines(lines.append, backends.computing_on)):
        mlp(torch.randn(FEW, FEATURES))
    assert len(lines) == 4, "of two layers"
    how = "; with the header; torch computes; eager"
    rows = f"column_linear: gather of x ({FEW}, {FEATURES}) torch.float32"
    assert re.fullmatch(rf"rank {dist.get_rank()} of 2 #\d+ {re.escape(rows + how)}", lines[0])
    rows = f"row_linear: shards of the sum ({2 * FEW}, {FEATURES}) torch.float32"
    assert lines[1].endswith(rows + how)


@on_ranks(2)
def test_explain_shows_sites_ways_and_what_hides():
    mlp = model()
    x = torch.randn(MANY, FEATURES, requires_grad=True)
    table = tpkernels.explain(lambda: mlp(x).sum().backward(), model=mlp)
    rows = {(row.op, row.moves.partition(" (")[0]): (row, count) for row, count in table.rows.items()}
    assert list(rows) == [
        ("column_linear", "gather of x"),
        ("row_linear", "shards of the sum"),
        ("row_linear backward", "gather of dy"),
        ("column_linear backward", "gather of x"),
        ("column_linear backward", "shards of the sum"),
    ]
    assert {count for _, count in rows.values()} == {2}, "of two layers"
    up, _ = rows["column_linear", "gather of x"]
    assert (up.site, up.by, up.hidden_behind) == ("layers.*.up", "shared memory, 4 chunks", "4 linear")
    assert up.notes == ("kernels are for GPUs, and it is on cpu",)
    text = str(table)
    assert text.splitlines()[1].startswith("2 x layers.*.up")
    assert text.splitlines()[-1] == "[1] kernels are for GPUs, and it is on cpu"
    assert table._repr_html_().count("<tr>") == 1 + len(rows)


@on_ranks(2)
def test_explain_says_why_nothing_hides():
    table = tpkernels.explain(model(), torch.randn(FEW, FEATURES))
    row = next(iter(table.rows))
    assert row.hidden_behind == "nothing"
    assert f"{FEW * FEATURES * 4:,} bytes a rank fit into the message that announces the call" in table.notes
    assert "it is small for shared memory" in table.notes


def test_explain_prints_html_safely():
    row = tpkernels.explanation.CallRow("<a>", "op", "-", "-", "-", "-", ("<b>",))
    assert "<a>" not in Explanation({row: 1})._repr_html_()
    assert "&lt;b&gt;" in Explanation({row: 1})._repr_html_()


@on_ranks(2)
def test_an_overlapped_call_is_asserted():
    mlp = model()
    with assert_overlapped("column_linear", "row_linear", "row_linear backward", "column_linear backward"):
        mlp(torch.randn(MANY, FEATURES, requires_grad=True)).sum().backward()
    with assert_overlapped():
        mlp(torch.randn(MANY, FEATURES))


@pytest.mark.parametrize(
    ("tokens", "overlap", "ops", "said"),
    [
        (MANY, False, (), "no product hides 4 of 4 transfers.*shared memory, 4 chunks; overlap=False"),
        (FEW, True, ("column_linear",), "2 of 2 transfers.*bytes a rank fit into the message"),
        (MANY, True, ("glu",), "expected transfers of glu; rows were moved by column_linear, row_linear"),
    ],
    ids=["sequential", "small", "absent"],
)
@on_ranks(2)
def test_a_bare_transfer_fails_the_assertion(tokens, overlap, ops, said):
    mlp = model(overlap)
    with pytest.raises(AssertionError, match=f"(?s){said}"), assert_overlapped(*ops):
        mlp(torch.randn(tokens, FEATURES))


PRODUCT = Running("gemm", 7, 10.0, 30.0)


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ([PRODUCT, Running("ncclDevKernel_AllGather", 13, 20.0, 50.0)], HiddenTime(30.0, 10.0)),
        (
            [PRODUCT, Running("Memcpy PtoP", 13, 0.0, 40.0), Running("gemm", 8, 20.0, 35.0)],
            HiddenTime(40.0, 25.0),
        ),
        ([PRODUCT, Running("ncclDevKernel_AllGather", 13, 30.0, 50.0)], HiddenTime(20.0, 0.0)),
        ([PRODUCT, Running("Memcpy DtoD", 7, 12.0, 20.0)], HiddenTime(8.0, 0.0)),
        ([PRODUCT], HiddenTime(0.0, 0.0)),
    ],
    ids=["beside", "two_kernels", "afterwards", "same_stream", "no_transfer"],
)
def test_time_of_a_gpu_that_hides_transfers(trace, expected):
    assert hidden_time(trace) == expected


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ([("gemm", 7, 10, 30), ("nccl", 13, 20, 50)], ""),
        ([("gemm", 7, 10, 30), ("nccl", 13, 30, 50)], "no kernel ran then: transfers took 20 us"),
        ([("gemm", 7, 10, 30)], "shows no transfer"),
    ],
    ids=["beside", "afterwards", "no_transfer"],
)
@on_ranks(2)
def test_a_trace_of_a_gpu_decides_in_eager_calls(trace, said):
    events = [
        SimpleNamespace(
            name=name,
            device_resource_id=stream,
            device_type=DeviceType.CUDA,
            time_range=SimpleNamespace(start=float(start), end=float(end)),
        )
        for name, stream, start, end in trace
    ]
    mlp = model()
    traced = nullcontext(SimpleNamespace(events=lambda: events))
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(tpkernels.testing, "profile", lambda activities: traced),
        pytest.raises(AssertionError, match=said) if said else nullcontext(),
        assert_overlapped("column_linear"),
    ):
        mlp(torch.randn(MANY, FEATURES))


@pytest.mark.parametrize(
    ("name", "ways", "hiding"),
    [
        ("column, sequence-parallel/c10d, 1 rounds/eager/2 ranks", ["1 collective"], [0]),
        ("mlp, sequence-parallel/symmetric/captured/2 ranks", ["a kernel waits", "a kernel stores"], [1, 1]),
        ("row, sequence-parallel/symmetric-rounds, 2 rounds/captured/2 ranks", ["2 rounds"], [1]),
    ],
)
def test_ways_of_gpus_are_told(name, ways, hiding):
    read = CallsRead({})
    with journal.read_by(read):
        all_programs()[name]()
    call = read.calls[0]
    assert [each.way.removeprefix("symmetric memory, ") for each in call.transfers] == ways
    assert [len(read.hidden_behind.get(each, ())) for each in call.transfers] == hiding
