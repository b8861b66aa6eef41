"""`lay_out_buckets`: every tensor has its place, and no two overlap."""

import itertools
import random

from tpkernels.buckets.layout import LayoutRules, lay_out_buckets


def lay_out(numels, *, kinds=None, width=4, bucket=400, first=400, alignment=1, padding=1):
    kinds = [0] * len(numels) if kinds is None else kinds
    rules = LayoutRules(bucket, first, alignment, padding)
    return lay_out_buckets(numels, kinds, [width] * len(numels), rules)


def test_tensors_fill_buckets_in_order():
    layout = lay_out([60, 40, 1, 99, 1])
    assert layout.bucket_of == [0, 0, 1, 1, 2]
    assert layout.offset_of == [0, 60, 0, 1, 0]
    assert layout.elements == [100, 100, 1]


def test_first_bucket_of_each_kind_is_small():
    layout = lay_out([10] * 6, kinds=[0, 0, 0, 7, 7, 7], first=80)
    assert layout.bucket_of == [0, 0, 1, 2, 2, 3]
    assert lay_out([10] * 3, first=10**9, bucket=80).bucket_of == [0, 0, 1]


def test_tensor_larger_than_a_bucket_has_its_own():
    assert lay_out([1, 1000, 1]).bucket_of == [0, 1, 2]
    assert lay_out([1000, 1000]).elements == [1000, 1000]


def test_tensors_are_aligned_and_buckets_padded():
    layout = lay_out([3, 5, 0, 1], alignment=4, padding=32)
    assert layout.offset_of == [0, 4, 12, 12]
    assert layout.elements == [32]


def test_buckets_are_numbered_as_they_become_complete():
    # kind 1 is opened first and filled last: were it bucket 0, it would hold back all others
    layout = lay_out([1, 100, 100, 1], kinds=[1, 0, 0, 1])
    assert layout.bucket_of == [2, 0, 1, 2]


def test_nothing_to_lay_out():
    layout = lay_out([])
    assert (layout.bucket_of, layout.offset_of, layout.elements) == ([], [], [])


def test_no_two_tensors_overlap():
    generator = random.Random(0)
    for _ in range(300):
        count = generator.randrange(1, 40)
        numels = [generator.choice([0, 1, 7, 64, 65, 500]) for _ in range(count)]
        kinds = [generator.randrange(3) for _ in range(count)]
        widths = [(2, 4, 8)[kind] for kind in kinds]
        rules = LayoutRules(
            generator.choice([1, 256, 4096]), generator.choice([64, 10**6]), 16, generator.choice([16, 128])
        )
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
