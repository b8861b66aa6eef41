"""`lay_out_buckets`: every tensor has its place, no two overlap, and buckets are small at both ends."""

import itertools
import random

import pytest

from tpkernels.buckets.layout import LayoutRules, lay_out_buckets


def lay_out(numels, *, kinds=None, width=4, bucket=400, smallest=400, alignment=1, padding=1):
    kinds = [0] * len(numels) if kinds is None else kinds
    rules = LayoutRules(bucket, smallest, alignment, padding)
    return lay_out_buckets(numels, kinds, [width] * len(numels), rules)


LAYOUTS = {  # of tensors of these sizes: their buckets, their offsets in them, and the buckets' sizes
    "in_order": ([60, 40, 1, 99, 1], {}, [0, 0, 1, 1, 2], [0, 60, 0, 1, 0], [100, 100, 1]),
    "larger_than_a_bucket": ([1, 1000, 1], {}, [0, 1, 2], [0, 0, 0], [1, 1000, 1]),
    "aligned_and_padded": ([3, 5, 0, 1], {"alignment": 4, "padding": 32}, [0] * 4, [0, 4, 12, 12], [32]),
    # kind 1 is opened first and filled last: were it bucket 0, it would hold back all others
    "as_completed": ([1, 100, 100, 1], {"kinds": [1, 0, 0, 1]}, [2, 0, 1, 2], [0, 0, 0, 1], [100, 100, 2]),
    "nothing": ([], {}, [], [], []),
}


@pytest.mark.parametrize(
    ("numels", "options", "buckets", "offsets", "elements"), LAYOUTS.values(), ids=LAYOUTS
)
def test_tensors_fill_buckets(numels, options, buckets, offsets, elements):
    layout = lay_out(numels, **options)
    assert (layout.bucket_of, layout.offset_of, layout.elements) == (buckets, offsets, elements)


def test_sizes_double_from_both_ends():
    layout = lay_out([1] * 100, width=1, bucket=16, smallest=1)
    assert layout.elements == [1, 1, 2, 4, 8, 16, 16, 16, 16, 10, 5, 2, 1, 1, 1]


def test_each_kind_doubles_by_itself():
    """Tensor-parallel ranks agree on marked tensors only, and sum buckets of these over their group."""
    alone = lay_out([10] * 9, kinds=["marked"] * 9, smallest=40)
    assert alone.elements == [10, 10, 20, 20, 10, 10, 10]
    for other in (1, 70, 1000):
        both = lay_out([10, other] * 9, kinds=["marked", "not"] * 9, smallest=40)
        marked = dict.fromkeys(both.bucket_of[::2])
        assert [both.elements[bucket] for bucket in marked] == alone.elements
        assert both.offset_of[::2] == alone.offset_of


def test_no_small_bucket_stands_alone():
    """A collective of less takes hardly less time."""
    assert lay_out([1, 1, 90, 1, 1], smallest=80).elements == [94]
    assert lay_out([30, 30, 1], smallest=80).elements == [30, 31]
    assert lay_out([30, 30, 1], smallest=80, bucket=120).elements == [30, 30, 1]
    assert lay_out([10] * 5, smallest=10**9, bucket=80).elements == [20, 20, 10]


def test_ends_are_small_and_nothing_grows_beyond_its_limits():
    generator = random.Random(0)
    for _ in range(400):
        bucket = generator.choice([64, 1000, 4096])
        smallest = bucket // generator.choice([1, 4, 16])
        numels = generator.choices([0, 1, 7, 64, 200, 2000], k=generator.randrange(1, 120))
        layout = lay_out(numels, bucket=bucket, smallest=smallest)
        sizes = [4 * elements for elements in layout.elements]
        assert layout.bucket_of == sorted(layout.bucket_of)
        assert sum(sizes) == 4 * sum(numels)
        largest_tensor = 4 * max(numels)
        before, after = 0, sum(sizes)
        for number, size in enumerate(sizes):
            after -= size
            alone = layout.bucket_of.count(number) == 1
            assert alone or size <= bucket
            assert alone or size <= max(2 * smallest + largest_tensor, min(before, after + largest_tensor))
            before += size
        alike = lay_out(numels, bucket=bucket, smallest=bucket)
        assert len(sizes) <= len(alike.elements) + 2 * (bucket // smallest).bit_length()


def test_no_two_tensors_overlap():
    generator = random.Random(0)
    for _ in range(300):
        count = generator.randrange(1, 40)
        numels = [generator.choice([0, 1, 7, 64, 65, 500]) for _ in range(count)]
        kinds = [generator.randrange(3) for _ in range(count)]
        widths = [(2, 4, 8)[kind] for kind in kinds]
        choices = ([1, 256, 4096], [64, 10**6], [16], [16, 128])
        rules = LayoutRules(*map(generator.choice, choices))
        layout = lay_out_buckets(numels, kinds, widths, rules)
        places = sorted(zip(layout.bucket_of, layout.offset_of, numels, kinds, strict=True))
        for (bucket, offset, numel, kind), after in itertools.pairwise(places):
            if bucket == after[0]:
                assert offset + numel <= after[1]
                assert kind == after[3]
        for bucket, offset, numel, _ in places:
            assert offset % 16 == 0
            assert offset + numel <= layout.elements[bucket]
        assert all(elements % rules.padding == 0 for elements in layout.elements)
        assert {*layout.bucket_of} == {*range(len(layout.elements))}
