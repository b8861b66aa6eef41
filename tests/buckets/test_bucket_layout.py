"""`bucket_layout`: every tensor has its place, both implementations agree, and nothing overlaps."""

import itertools
import random

import pytest
import torch

from tests.buckets.test_ext import needs_extension
from tpkernels.buckets.layout import LayoutRules, lay_out_buckets

IMPLEMENTATIONS = pytest.mark.parametrize(
    "native", [pytest.param(True, marks=needs_extension, id="cpp"), pytest.param(False, id="python")]
)


def lay_out(numels, *, kinds=None, width=4, native=False, bucket=400, first=400, alignment=1, padding=1):
    kinds = [0] * len(numels) if kinds is None else kinds
    rules = LayoutRules(bucket, first, alignment, padding)
    return lay_out_buckets(numels, kinds, [width] * len(numels), rules, native=native)


@IMPLEMENTATIONS
def test_tensors_fill_buckets_in_order(native):
    layout = lay_out([60, 40, 1, 99, 1], native=native)
    assert layout.bucket_of == [0, 0, 1, 1, 2]
    assert layout.offset_of == [0, 60, 0, 1, 0]
    assert layout.elements == [100, 100, 1]


@IMPLEMENTATIONS
def test_first_bucket_of_each_kind_is_small(native):
    layout = lay_out([10] * 6, kinds=[0, 0, 0, 7, 7, 7], first=80, native=native)
    assert layout.bucket_of == [0, 0, 1, 2, 2, 3]
    assert lay_out([10] * 3, first=10**9, bucket=80, native=native).bucket_of == [0, 0, 1]


@IMPLEMENTATIONS
def test_tensor_larger_than_a_bucket_has_its_own(native):
    assert lay_out([1, 1000, 1], native=native).bucket_of == [0, 1, 2]
    assert lay_out([1000, 1000], native=native).elements == [1000, 1000]


@IMPLEMENTATIONS
def test_tensors_are_aligned_and_buckets_padded(native):
    layout = lay_out([3, 5, 0, 1], alignment=4, padding=32, native=native)
    assert layout.offset_of == [0, 4, 12, 12]
    assert layout.elements == [32]


@IMPLEMENTATIONS
def test_buckets_are_numbered_as_they_become_complete(native):
    # kind 1 is opened first and filled last: were it bucket 0, it would hold back all others
    layout = lay_out([1, 100, 100, 1], kinds=[1, 0, 0, 1], native=native)
    assert layout.bucket_of == [2, 0, 1, 2]


@IMPLEMENTATIONS
def test_nothing_to_lay_out(native):
    layout = lay_out([], native=native)
    assert (layout.bucket_of, layout.offset_of, layout.elements) == ([], [], [])


@needs_extension
def test_both_implementations_agree_and_no_two_tensors_overlap():
    generator = random.Random(0)
    for _ in range(300):
        count = generator.randrange(1, 40)
        numels = [generator.choice([0, 1, 7, 64, 65, 500]) for _ in range(count)]
        kinds = [generator.randrange(3) for _ in range(count)]
        widths = [(2, 4, 8)[kind] for kind in kinds]
        rules = LayoutRules(
            generator.choice([1, 256, 4096]), generator.choice([64, 10**6]), 16, generator.choice([16, 128])
        )
        layout = lay_out_buckets(numels, kinds, widths, rules, native=True)
        assert layout == lay_out_buckets(numels, kinds, widths, rules, native=False)
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


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": [0]}, "one kind and one element size for each of 2 tensors, got 1 and 2"),
        ({"bucket": 0}, "bucket sizes of at least one byte, got 0 and 400"),
        ({"alignment": 0}, "at least one element, got 0 and 1"),
        ({"padding": -1}, "at least one element, got 1 and -1"),
    ],
    ids=["lengths", "bytes", "alignment", "padding"],
)
def test_impossible_rules_are_refused(native, arguments, words):
    with pytest.raises(ValueError, match=words):
        lay_out([1, 2], native=native, **arguments)


@needs_extension
def test_operator_is_in_the_dispatcher():
    schema = str(torch.ops.tpkernels.bucket_layout.default._schema)
    assert schema.startswith("tpkernels::bucket_layout(int[] numels, int[] kinds, int[] element_bytes, *, ")
    assert schema.endswith("int padding) -> (int[], int[], int[])")
