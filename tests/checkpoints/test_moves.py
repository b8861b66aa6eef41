"""Every element that a rank needs reaches it once, from a rank that has it, and nothing else is sent."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpkernels.checkpoints.moves import Placement, elements, messages_of, moves_of, parts_of
from tpkernels.groups.sizes import ranges_of, split_heads, split_vocabulary, stacked_ranges

WORLD, SIZE, COLUMNS = 6, 24, 6
KINDS = ("plain", "strided", "fused", "padded", "heads", "experts", "replicated")
FUSED = (12, 6, 6)  # of queries, keys, values; gate and up; A of several LoRA adapters


def ranges_by_rank(kind, ranks):
    """Of a dimension of SIZE, on each tensor-parallel rank."""
    splits = {
        "plain": lambda rank: ranges_of(rank, size=SIZE, ranks=ranks),
        "strided": lambda rank: ranges_of(rank, size=SIZE, ranks=ranks, stride=2),
        "fused": lambda rank: stacked_ranges(rank, FUSED, ranks),
        "padded": lambda rank: (split_vocabulary(SIZE, ranks=ranks, divisible_by=5).ids_of(rank),),
        "heads": lambda rank: (split_heads(SIZE, kv_heads=3, ranks=ranks).features_of(rank),),
        "experts": lambda rank: tuple(range(i, i + 1) for i in range(rank, SIZE, ranks)),
        "replicated": lambda rank: (range(SIZE),),
    }
    return [splits[kind](rank) for rank in range(ranks)]


@st.composite
def layouts(draw):
    """Blocks of each rank: some ranks of the world, tensor-parallel, replicated or cut once more by FSDP."""
    kind = draw(st.sampled_from(KINDS))
    tensor, data = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (6, 1)]))
    first, dim = draw(st.integers(0, WORLD - tensor * data)), draw(st.integers(0, 1))
    is_cut = draw(st.booleans())
    blocks = [()] * WORLD
    for place in range(tensor * data):
        copy, rank = divmod(place, tensor)
        own = []
        for each in ranges_by_rank(kind, tensor)[rank]:
            begin, end = each.start, each.stop
            if is_cut:
                bounds = [begin + (end - begin) * part // data for part in (copy, copy + 1)]
                begin, end = bounds
            block = [(0, COLUMNS), (0, COLUMNS)]
            block[dim] = begin, end
            own.append(tuple(block))
        blocks[first + place] = tuple(own)
    return blocks


def cells(blocks):
    return Counter(cell for block in blocks for cell in product(*(range(*each) for each in block)))


@settings(max_examples=120)
@given(layouts(), layouts(), st.lists(st.integers(0, 2), min_size=WORLD, max_size=WORLD), st.data())
def test_each_lacking_element_is_sent_once_and_no_other(held, wanted, machines, data):
    everything = set().union(*map(cells, held))
    wanted = [tuple(block for block in blocks if cells([block]).keys() <= everything) for blocks in wanted]
    placement = Placement("w", 2, held, wanted)
    moves = moves_of([placement], machines)
    for rank in range(WORLD):
        received = cells([move.block for move in moves if move.receiver == rank])
        assert received == cells(wanted[rank])
        sent = sum(move.size for move in moves if move.receiver == rank != move.sender)
        assert sent == 2 * len(cells(wanted[rank]).keys() - cells(held[rank]).keys())
    for move in moves:
        block = cells([move.block]).keys()
        assert block <= cells(held[move.sender]).keys()
        near = [rank for rank in range(WORLD) if machines[rank] == machines[move.receiver]]
        if any(block <= cells(held[rank]).keys() for rank in near):
            assert move.sender in near
    bucket, buckets = data.draw(st.integers(2, 64)), data.draw(st.integers(1, 3))
    messages, carried = messages_of(moves, bucket, WORLD), Counter()
    for message in messages:
        assert message.size <= bucket
        for move in message.moves:
            assert (move.sender, move.receiver) == (message.sender, message.receiver)
            carried.update((message.receiver, cell) for cell in cells([move.block]))
    expected = ((m.receiver, cell) for m in moves if m.sender != m.receiver for cell in cells([m.block]))
    assert carried == Counter(expected)
    alike = [placement._replace(name=f"w{i}") for i in range(3)]  # of which others send each
    moves, plans = moves_of(alike, machines), []
    messages = messages_of(moves, bucket, WORLD)
    for rank in range(WORLD):
        own = moves_of(alike, machines, rank)
        assert own == [move for move in moves if rank in (move.sender, move.receiver)]
        plans.append(messages_of(own, bucket, WORLD))
        assert plans[rank] == [each for each in messages if rank in (each.sender, each.receiver)]
    assert not any(stuck(plans, buckets))


def stuck(plans, buckets):
    """What does not arrive if each rank starts so many messages at once, and goes on when all have arrived.

    As over NCCL: a rank's next messages wait for those before; two ranks tell theirs by their order.
    """
    launches = []
    for plan in plans:
        numbered, seen = [], Counter()
        for message in plan:
            pair = message.sender, message.receiver
            numbered.append((*pair, seen[pair]))
            seen[pair] += 1
        launches.append([set(numbered[i : i + buckets]) for i in range(0, len(numbered), buckets)])
    while True:
        under_way = Counter(message for own in launches for message in (own[0] if own else ()))
        arrived = {message for message, ranks in under_way.items() if ranks == 2}
        if not arrived:
            return launches
        for own in launches:
            if own and not own[0].difference_update(arrived) and not own[0]:
                own.pop(0)


def test_replicas_share_the_work():
    whole, ranks = ((0, 64),), 8
    held = [(whole,)] * 4 + [()] * 4  # four trainers, four generators on the same machine
    wanted = [()] * 4 + [(whole,)] * 4
    moves = moves_of([Placement(f"w{i}", 4, held, wanted) for i in range(6)], [0] * ranks)
    assert Counter(move.sender for move in moves) == dict.fromkeys(range(4), 6)


@pytest.mark.parametrize("block", [(), ((0, 1),), ((3, 9), (0, 5), (2, 4))])
@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_parts_of_a_block_are_all_of_it_and_small(block, most):
    parts = list(parts_of(block, most))
    assert cells(parts) == cells([block])
    assert max(map(elements, parts)) <= most


def test_what_nobody_holds_is_an_error():
    with pytest.raises(ValueError, match=r"'w': rank 1 needs \[4:6\], which no rank holds"):
        moves_of([Placement("w", 2, [(((0, 4),),), ()], [(), (((2, 6),),)])], [0, 0])


def test_a_number_without_dimensions_moves():
    (move,) = moves_of([Placement("step", 8, [((),), ()], [(), ((),)])], [0, 1])
    assert move == ("step", 0, 1, (), 8)
    assert messages_of([move], 4, 2)[0].size == 8
