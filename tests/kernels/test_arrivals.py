"""Products of rows that arrive. In tests/ops other ranks write them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.checks import DTYPES, EMPTY_SHAPES, SHAPES, TILE, normal, raise_if_late
from tests.kernels.launchers import arguments, computed
from tests.kernels.ring import first_tile
from tests.kernels.test_scaled_linear import TILE as FP8_TILE
from tests.kernels.test_scaled_linear import operands as fp8_operands
from tests.kernels.waiting import EPOCH, PATIENCE, arrivals, at_each_look, interpreted
from tests.products import pairwise
from tpkernels.kernels.blocks import tile_at
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reference import linear_ref
from tpkernels.kernels.scaled_linear import scaled_linear_fwd
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Arrivals, arrived


def operands(*shape_dtype_and_device):
    call = arguments("linear", *shape_dtype_and_device)
    return call["x"], call["weight"], call["bias"]


def evenly(shape: tuple[int, int, int], chunks: int) -> tuple[int, int, int]:
    return (shape[0] + -shape[0] % chunks, *shape[1:])


WAITING = ("linear", "glu", "dgrad", "dgrad_pairs", "dgrad_act", "dglu")


@pairwise(name=WAITING, shape=SHAPES, chunks=[1, 3, 8], dtype=DTYPES)
def test_products_of_rows_that_arrive_have_the_same_bits(name, shape, chunks, dtype, device):
    call = arguments(name, evenly(shape, chunks), dtype, device)
    here, expected = arrivals(device, *[EPOCH] * chunks), computed(name, call)
    rows = next(iter(call.values())).shape[0] // chunks
    for chunk in {0, chunks - 1}:
        found = computed(name, call, arrivals=here, first_row=chunk * rows)
        assert all(map(same, found, expected))
    assert not here.status.item()


def same(one, other):
    return one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("shape", EMPTY_SHAPES.values(), ids=EMPTY_SHAPES.keys())
def test_nothing_arrives_of_what_is_empty(shape, device):
    x, w, b = operands(evenly(shape, 2), torch.float32, device)
    y = linear_fwd(x, w, b, arrivals=arrivals(device, EPOCH, EPOCH)).y
    torch.testing.assert_close(y, linear_ref(x, w, b, "none", False)[0])


@triton.jit
def _order_kernel(
    rows_ptr, flags_ptr, awaited_ptr, status_ptr, first_tile, row_tiles, col_tiles, GROUP: tl.constexpr
):
    for index in tl.range(0, row_tiles * col_tiles):
        row_tile, col_tile = tile_at(index, row_tiles, col_tiles, GROUP)
        row_tile = arrived(
            *(row_tile, row_tiles, row_tiles, flags_ptr, awaited_ptr, status_ptr, first_tile, row_tiles),
            *(1, 1, False, False),
        )
        tl.store(rows_ptr + index, row_tile * col_tiles + col_tile)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_tiles_keep_to_the_order_of_the_schedule(group, device):
    for ranks, size, block_rows, cols in [(1, 5, 4, 3), (2, 16, 4, 2), (3, 5, 4, 1), (4, 7, 8, 3)]:
        for rank in range(ranks):
            tiles, first = -(-ranks * size // block_rows), first_tile(rank, ranks * size, ranks, block_rows)
            order = [(first + step) % tiles for step in range(tiles)]
            found = torch.empty(tiles * cols, dtype=torch.int32, device=device)
            _order_kernel[(1,)](found, *arrivals(device, EPOCH)[:3], first, tiles, cols, GROUP=group)
            assert sorted(found.tolist()) == list(range(len(found)))  # every tile once
            rows = [index // cols for index in found.tolist()]
            for start in range(0, tiles, group):  # `group` tiles of rows at a time, in the order
                taken, rows = rows[: group * cols], rows[group * cols :]
                assert set(taken) == set(order[start : start + group])


@pytest.fixture(params=[*WAITING, "rows", "blocks"])  # the latter are scalings of fp8
def arriving(request, device):
    """Rows are NaN until they come: flags, what will be, the product of a rank, the steps of a chunk."""

    def arriving(chunks):
        here = arrivals(device, *[EPOCH - 1] * chunks)
        if request.param in WAITING:
            call = arguments(request.param, (48, 45, 40), torch.float32, device)
            moved = ("x", "dy", "dy2")
            comes = {
                name: (torch.full_like(call[name], float("nan")), call[name])
                for name in moved
                if name in call
            }
            expected = computed(request.param, call)[0]
            given = call | {name: x for name, (x, _) in comes.items()}
            pairs = [*comes.values()]

            def multiplied(**options):
                return computed(request.param, given, arrivals=here, **options)[0]

        else:
            fp8, w, b = fp8_operands((48, 300, 40), device, request.param, square=True)
            coming, options = fp8.with_words(torch.full_like(fp8.words, -1)), {"tile": FP8_TILE}
            expected = scaled_linear_fwd(fp8.data, w.data, fp8.scale, w.scale_of_squares, b, **options).y
            pairs = [(coming.words, fp8.words)]
            operands = coming.data, w.data, coming.scale, w.scale_of_squares, b

            def multiplied(**others):
                return scaled_linear_fwd(*operands, arrivals=here, **options, **others).y

        def steps(chunk):
            writes = [
                partial(x.chunk(chunks)[chunk].copy_, source.chunk(chunks)[chunk]) for x, source in pairs
            ]
            return [*writes, partial(here.flags[chunk].fill_, EPOCH)]

        return here, expected, multiplied, steps

    return arriving


@interpreted
@pytest.mark.parametrize("chunks", [2, 3, 6])  # of 24, 16 and 8 rows, in tiles of 32
@pytest.mark.parametrize("direction", [1, -1], ids=["in_order", "backwards"])
def test_nothing_of_a_row_is_read_before_its_flag(chunks, direction, arriving):
    here, expected, multiplied, steps = arriving(chunks)
    with at_each_look([step for chunk in range(chunks)[::direction] for step in steps(chunk)]) as left:
        y = multiplied(first_row=48 // chunks)
    raise_if_late(here, rank=0)
    assert not left
    assert torch.equal(y, expected)


@interpreted
def test_a_flag_before_its_data_shows(arriving):
    _, _, multiplied, steps = arriving(2)
    (*writes_0, raise_0), (*writes_1, raise_1) = steps(0), steps(1)
    with at_each_look([raise_0, raise_1, *writes_0, *writes_1]):
        assert multiplied().isnan().any()


@pytest.mark.needs("fp8")
@pairwise(
    form=[None, "pointer"],  # the last shape has descriptors
    shape=[(72, 272, 144), (71, 301, 51), (6, 40, 16), (144, 1056, 264)],
    chunks=[1, 3, 6],
    scaling=["rows", "blocks"],
    fast=[False, True],
    dtype=["bfloat16", "float32"],
)
def test_fp8_has_the_bits_of_a_gather_before_it(shape, chunks, scaling, fast, dtype, form, device):
    """With e5m2 rows as well, which are gradients; a weight's scales are one for each 128 rows."""
    format = "e5m2" if fast else "e4m3"
    x, w, b = fp8_operands(evenly(shape, chunks), device, scaling, (format, "e4m3"), square=True)
    here = arrivals(device, *[EPOCH] * chunks)
    options = {"activation": "gelu", "keep_z": True, "dtype": dtype, "fast_accumulate": fast}
    options |= {"tile": FP8_TILE, "form": form}
    given = x.data, w.data, x.scale, w.scale_of_squares, b
    expected = scaled_linear_fwd(*given, **options)
    for chunk in {0, chunks - 1}:
        first = chunk * (x.words.shape[0] // chunks)
        y, z = scaled_linear_fwd(*given, arrivals=here, first_row=first, **options)
        assert torch.equal(y, expected.y)
        assert torch.equal(z, expected.z)
    assert not here.status.item()


@interpreted
def test_a_chunk_that_never_comes_is_an_error(device):
    x, w, b = operands((64, 32, 64), torch.float32, device)
    tile = MatmulTile(16, 16, 16, num_warps=4, num_stages=1)
    here = arrivals(device, EPOCH, EPOCH, EPOCH - 1, EPOCH, spin_limit=PATIENCE)
    looks = []
    with at_each_look([lambda: looks.append(1)] * 10 * PATIENCE):
        linear_fwd(x, w, b, arrivals=here, tile=tile)
    assert PATIENCE < len(looks) < 2 * PATIENCE, "4 tiles of 4 chunks wait: only the first spins"
    with pytest.raises(RuntimeError, match="product on rank 3: chunk 2 had not arrived"):
        raise_if_late(here, rank=3)


def test_all_that_a_tile_has_rows_of_is_waited_for(device):
    """Each chunk held back in turn: the error names it, also where a tile straddles chunks."""
    x, w, b = operands((72, 16, 16), torch.float32, device)
    for late in range(6):
        flags = [EPOCH - (chunk == late) for chunk in range(6)]
        here = arrivals(device, *flags, spin_limit=2)
        linear_fwd(x, w, b, arrivals=here, first_row=24, tile=TILE)
        with pytest.raises(RuntimeError, match=f"chunk {late} had not arrived"):
            raise_if_late(here, rank=0)


@pytest.mark.needs("fp8")
def test_what_cannot_be_waited_for_is_refused(device):
    here = arrivals(device, EPOCH, EPOCH)

    def refused(match, kernel, given, arrivals=here, **options):
        with pytest.raises(ValueError, match=match):
            kernel(*given, arrivals=arrivals, **options)

    x, *_ = given = operands((6, 8, 16), torch.float32, device)
    fp8, w8, _ = fp8_operands((6, 40, 16), device)
    given_fp8 = fp8.data, w8.data, fp8.scale, w8.scale
    launchers = {
        name: (partial(computed, name), arguments(name, (6, 8, 16), torch.float32, device))
        for name in WAITING
    }
    for kernel, operands_of, tile in (
        *((kernel, (call,), TILE) for kernel, call in launchers.values()),
        (scaled_linear_fwd, given_fp8, FP8_TILE),
    ):
        uneven = "expected equal chunks of tokens, got 6 tokens and 4 flags"
        refused(uneven, kernel, operands_of, arrivals(device, *[EPOCH] * 4))
        refused("flatten=False", kernel, operands_of, tile=replace(tile, flatten=True))
        refused("expected arrivals with first_row and margin", kernel, operands_of, None, first_row=3)
    deep = replace(FP8_TILE, block_depth=256)
    refused("a tile of at most 128 depth", scaled_linear_fwd, given_fp8, tile=deep)
    refused("first_row of 0 to 5, got 6", linear_fwd, given, first_row=6)
    refused(r"margin of 0 to .* processors, got 9999", linear_fwd, given, margin=9999)
    other = normal(16, 9, torch.float32, device)
    refused(r"weight of shape \(16, 8\).*got \(16, 9\)", linear_fwd, (x, other))
    fields = {"flags": here.flags, "awaited": here.awaited, "status": here.status}
    wrong = {"flags": here.flags.long(), "awaited": here.flags, "status": here.status.float()}
    for name, bad in wrong.items():
        refused(f"expected {name} of", linear_fwd, given, Arrivals(**fields | {name: bad}))
    elsewhere = Arrivals(here.flags.to("meta"), here.awaited, here.status)
    refused(r"flags on .* got meta", linear_fwd, given, elsewhere)
