"""`reduce_slots`: exact in fp32 order, the same bits whenever slots arrive; and the count of calls."""

import pytest
import torch

from tests.kernels.checks import DTYPES, assert_accurate, raise_if_late
from tests.kernels.waiting import EPOCH, PATIENCE, arrivals, at_each_look, interpreted
from tests.products import once, pairwise
from tpkernels.kernels import launch
from tpkernels.kernels.flags import advance
from tpkernels.kernels.reduce import add_slots, reduce_slots
from tpkernels.kernels.reference import reduce_slots_ref
from tpkernels.kernels.target import H100, INTERPRETER
from tpkernels.kernels.tiles import BlockTile
from tpkernels.kernels.waits import spins_in

TILE = BlockTile(block_rows=16, block_cols=32, num_warps=4)
OUT = {"into_fp32": torch.float32, "into_bf16": torch.bfloat16}
SHAPES = {"one_block": (2, 16, 32), "ragged": (4, 45, 37), "one_row": (3, 1, 300), "one_slot": (1, 30, 20)}


def random_slots(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pairwise(shape=SHAPES, out=OUT, dtype=DTYPES)
def test_reduce_slots_has_the_bits_of_the_ordered_sum(shape, out, dtype, device):
    slots, bias = random_slots(shape, dtype, device), torch.randn(shape[2], device=device).to(dtype)
    for b in (None, bias):
        y = reduce_slots(slots, b, dtype=out, tile=TILE)
        assert y.dtype == out
        assert torch.equal(y, reduce_slots_ref(slots, b, out))
        if y.numel() > 500:
            assert_accurate(y, reduce_slots_ref(slots.double(), None if b is None else b.double()))


def test_reduce_slots_does_not_add_in_bf16(device):
    """1 + 2⁻⁸ + 2⁻⁸ is 1 in bf16 step by step, and 1 + 2⁻⁷ if rounded once."""
    slots = torch.tensor([1.0, 2**-8, 2**-8], dtype=torch.bfloat16, device=device)[:, None, None].expand(
        3, 16, 32
    )
    assert (reduce_slots(slots) == 1 + 2**-7).all()


@pytest.mark.parametrize("shape", [(2, 0, 8), (2, 8, 0)], ids=["no_tokens", "no_features"])
def test_reduce_slots_takes_empty(shape, device):
    assert reduce_slots(torch.empty(shape, device=device)).shape == shape[1:]


def test_reduce_slots_takes_any_strides(device):
    wide = random_slots((45, 3, 80), torch.float16, device)
    slots = wide.transpose(0, 1)[:, :, ::2]
    assert torch.equal(reduce_slots(slots), reduce_slots_ref(slots))


@pairwise(shape=SHAPES, dtype=DTYPES, accumulate=[False, True])
def test_slots_are_added_into_any_dtype_and_strides(shape, dtype, accumulate, device):
    """The old values last, in fp32; where they are not asked for they may be NaN."""
    slots = random_slots(shape, torch.float32, device)
    wide = torch.full((shape[1], 2 * shape[2]), float("nan"), dtype=dtype, device=device)
    y = wide[:, ::2]
    if accumulate:
        y.normal_()
    total = reduce_slots_ref(slots)
    expected = (total + y.float() if accumulate else total).to(dtype)
    add_slots(y, slots, accumulate=accumulate)
    assert torch.equal(y, expected)
    assert wide[:, 1::2].isnan().all()


@once(slots=[1, 2, 4, 8, 16], out=OUT)
def test_a_tree_adds_neighbours_first_to_the_bit(slots, out, device):
    values, bias = random_slots((slots, 45, 37), torch.float32, device), torch.randn(37, device=device)
    for b in (None, bias):
        y = reduce_slots(values, b, dtype=out, tree=True, tile=TILE)
        assert torch.equal(y, reduce_slots_ref(values, b, out, tree=True))
    if slots > 2:
        assert not torch.equal(reduce_slots(values), reduce_slots_ref(values, tree=True)), "orders differ"


def test_a_tree_of_one_slot_keeps_signs(device):
    """What is added to nothing keeps -0, as at other numbers of slots."""
    slots = torch.full((1, 4, 8), -0.0, device=device)
    assert reduce_slots(slots, tree=True).signbit().all()
    assert reduce_slots(slots.expand(4, 4, 8), tree=True).signbit().all()


@pytest.mark.parametrize("slots", [3, 6])
def test_a_tree_of_other_numbers_is_refused(slots, device):
    with pytest.raises(ValueError, match=f"expected a power of two of slots to add in a tree, got {slots}"):
        reduce_slots(torch.zeros(slots, 4, 8, device=device), tree=True)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2, 3], [3, 0, 2, 1]], ids=str)
def test_reduce_slots_has_the_same_bits_whatever_arrives_first(order, splits, device):
    count, tree = len(order), len(order) == 4
    source = random_slots((count, 48, 40), torch.bfloat16, device)
    slots, here = torch.full_like(source, float("nan")), arrivals(device, *[EPOCH - 1] * (count * splits))
    chunks = [slot * splits + part for slot in order for part in reversed(range(splits))]

    def write(chunk):
        ours, theirs = (all_of_them.view(count * splits, -1) for all_of_them in (slots, source))
        ours[chunk] = theirs[chunk]

    with at_each_look(
        step
        for chunk in chunks
        for step in (lambda c=chunk: write(c), lambda c=chunk: here.flags[c].fill_(EPOCH))
    ) as left:
        y = reduce_slots(slots, arrivals=here, tree=tree, tile=TILE)
    raise_if_late(here, rank=0)
    assert not left
    assert torch.equal(y, reduce_slots_ref(source, tree=tree))


@once(late=range(6), slots=[3, 2])
def test_a_slot_that_never_comes_is_named(slots, late, device):
    tree = slots == 2
    flags = [EPOCH - (chunk == late) for chunk in range(6)]
    here = arrivals(device, *flags, spin_limit=PATIENCE)
    reduce_slots(torch.zeros(slots, 48, 8, device=device), arrivals=here, tree=tree)
    with pytest.raises(RuntimeError, match=f"reduce_slots on rank 1: chunk {late} had not arrived"):
        raise_if_late(here, rank=1)


def test_a_slot_may_have_some_of_the_flags(device):
    """A sum over one slot is a copy that waits for it; chunks keep their numbers."""
    slots = random_slots((1, 45, 37), torch.bfloat16, device)
    flags = [EPOCH - 1, EPOCH, EPOCH, EPOCH, EPOCH - 1]
    here = arrivals(device, *flags, spin_limit=PATIENCE)
    assert torch.equal(reduce_slots(slots, arrivals=here, chunks=range(1, 4)), slots[0])
    raise_if_late(here, rank=0)
    reduce_slots(slots, arrivals=here, chunks=range(4, 5))
    with pytest.raises(RuntimeError, match="chunk 4 had not arrived"):
        raise_if_late(here, rank=0)
    for chunks in (range(3, 6), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match="expected chunks among 5 flags"):
            reduce_slots(slots, arrivals=here, chunks=chunks)
    with pytest.raises(ValueError, match="got 2 flags"):
        reduce_slots(slots, arrivals=here, chunks=range(2))


@pytest.mark.parametrize(
    ("margin", "tree", "programs", "block"),
    [(0, False, 132 * 8, (16, 128)), (17, False, 132 - 17, (32, 512)), (17, True, 132 - 17, (16, 128))],
)
def test_a_program_alone_on_its_processor_sums_larger_blocks(margin, tree, programs, block):
    """As many bytes are on their way to a processor as where it has eight programs. A tree would spill."""
    slots = torch.empty(2, 8192, 4096, dtype=torch.bfloat16, device="meta")
    with launch.recording(H100) as launches:
        reduce_slots(slots, margin=margin, tree=tree)
    (launched,) = launches
    found = launched.constants
    assert (launched.grid, (found["BLOCK_ROWS"], found["BLOCK_COLS"])) == ((programs,), block)


def test_waits_are_bounded_by_what_a_kernel_can_count():
    assert spins_in(2.0, INTERPRETER) == 10_000
    assert spins_in(30.0, H100) == 30_000_000
    assert spins_in(1e9, H100) == 2**31 - 1


def test_reduce_slots_refuses_what_cannot_work(device):
    slots = torch.zeros(2, 6, 8, device=device)

    def refused(match, error=ValueError, slots=slots, bias=None, **options):
        with pytest.raises(error, match=match):
            reduce_slots(slots, bias, **options)

    refused(r"slots of \(ranks, tokens, features\), got \(6, 8\)", slots=slots[0])
    refused(r"bias of \(8,\) for 8 features, got \(7,\)", bias=slots.new_zeros(7))
    refused(r"as dtype, got torch.float64", TypeError, dtype=torch.float64)
    refused("margin of 0 to", margin=-1)
    for flags in (3, 8):
        uneven = f"2 slots of 6 rows to be cut evenly by their flags, got {flags}"
        refused(uneven, arrivals=arrivals(device, *[EPOCH] * flags))
    integers = torch.ones(2, 4, 8, dtype=torch.int32, device=device)
    one_slot = "expected one slot of int32 words, to be copied"
    refused(one_slot, TypeError, integers)
    refused(one_slot, TypeError, integers[:1], bias=torch.ones(8, device=device))
    refused(one_slot, TypeError, integers[:1], dtype=torch.float32)


AWKWARD_WORDS = [-(2**31), 1, 0x7F80_0001, -1, 2**24 + 1, -(2**24) - 1]


def test_reduce_slots_copies_words_of_one_slot_bit_for_bit(device):
    random = torch.randint(-(2**31), 2**31, (1, 19, 45), device=device).to(torch.int32)
    random[0, 0, : len(AWKWARD_WORDS)] = torch.tensor(AWKWARD_WORDS, device=device)
    for tree in (False, True):
        copied = reduce_slots(random, tree=tree, tile=TILE)
        assert copied.dtype == torch.int32
        assert torch.equal(copied, random[0])


def words(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_advance_counts_calls_past_2_to_the_31(device):
    word, awaited = words(device, 2**31 - 2 * 2**20), words(device, 0)
    for expected in (2**31 - 2**20, -(2**31), -(2**31) + 2**20):
        advance(word, awaited, 2**20, 5)
        assert (word.tolist(), awaited.tolist()) == ([expected], [expected + 5])


def test_advance_refuses_what_cannot_work(device):
    word, table = words(device, 1), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"advance: expected word of \(1,\).* in torch.int64"):
        advance(table[:1], word, 1, 1)
    with pytest.raises(ValueError, match=r"advance: expected awaited on .* got meta"):
        advance(word, word.to("meta"), 1, 1)
