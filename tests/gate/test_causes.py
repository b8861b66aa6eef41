"""What got worse between two compilations, and why: by facts as they are found, each fault with its cause."""

from dataclasses import replace

import pytest

from tests.gate.samples import FACTS
from tpkernels.gate.causes import at_least, changes

# a product with a pipeline, and a kernel of rows without
PRODUCT = replace(
    FACTS,
    threads=256,
    blocks=1,
    registers=168,
    shared=100_000,
    instructions={"HGMMA": 8, "LDGSTS": 8, "LDGSTS.128": 8, "all": 900},
    pipeline=(4, 4),
    loops=1,
    loop={"all": 100, "products": 4, "others": 80, "barriers": 2, "shared loads": 4, "work": 1000},
)
ROWS = replace(
    FACTS,
    threads=128,
    blocks=8,
    registers=64,
    shared=64,
    in_flight=0,
    instructions={"LDG": 8, "LDG.128": 8, "STG": 8, "STG.128": 8, "all": 300},
    loop={"all": 300, "loads": 8, "stores": 8, "floats": 128, "others": 140, "shuffles": 16, "work": 256},
    load_bytes=128,
    load_waits=1,
)


def loop_of(facts, **mix):
    return replace(facts, loop=facts.loop | {name.replace("_", " "): count for name, count in mix.items()})


CHANGES = {
    "registers_over_a_limit": (
        (ROWS, replace(ROWS, registers=72, blocks=7)),
        ("worse", "64 to 72 registers: occupancy 50 to 44 %"),
    ),
    "registers_below_one": (
        (replace(ROWS, registers=72, blocks=7), ROWS),
        ("better", "72 to 64 registers: occupancy 44 to 50 %"),
    ),
    "registers_of_the_same_blocks": (
        (PRODUCT, replace(PRODUCT, registers=191)),
        ("note", "168 to 191 registers, still 1 block an SM"),
    ),
    "registers_within_a_unit": ((PRODUCT, replace(PRODUCT, registers=161)), None),
    "fewer_registers_of_the_same_blocks": ((PRODUCT, replace(PRODUCT, registers=128)), None),
    "shared_memory_over_a_limit": (
        (replace(PRODUCT, blocks=2, registers=96), replace(PRODUCT, registers=96, shared=120_000)),
        ("worse", "100,000 to 120,000 bytes of shared memory: occupancy 25 to 12 %"),
    ),
    "fewer_threads": (
        (PRODUCT, replace(PRODUCT, threads=128)),
        ("worse", "256 to 128 threads a block: occupancy 12 to 6 %"),
    ),
    "half_a_pipeline": (
        (PRODUCT, replace(PRODUCT, pipeline=(2, 2), shared=50_000)),
        ("worse", "a pipeline of 4 is one of 2"),
    ),
    "half_a_pipeline_in_twice_the_blocks": (
        (replace(PRODUCT, registers=96), replace(PRODUCT, registers=96, pipeline=(2, 2), blocks=2)),
        ("note", "a pipeline of 4 is one of 2, in 2 blocks an SM instead of 1"),
    ),
    "no_pipeline": (
        (PRODUCT, replace(PRODUCT, pipeline=())),
        ("severe", "no operand is copied ahead: the pipeline of 4 is lost"),
    ),
    "one_operand_fewer": (
        (PRODUCT, replace(PRODUCT, pipeline=(4,))),
        ("severe", "2 operands were copied ahead, 1 are"),
    ),
    "serialised": (
        (PRODUCT, replace(PRODUCT, in_flight=0)),
        ("severe", "products are awaited one by one: batches in flight 1 to 0"),
    ),
    "serialised_by_spills": (
        (PRODUCT, replace(loop_of(PRODUCT, spills=6), spills=9, in_flight=0)),
        ("severe", "registers spill in the inner loop: 0 to 6 accesses a turn"),
    ),
    "serialised_by_an_operand": (
        (PRODUCT, replace(PRODUCT, pipeline=(4,), in_flight=0)),
        ("severe", "2 operands were copied ahead, 1 are"),
    ),
    "loads_of_an_epilogue": (
        (replace(PRODUCT, load_bytes=256), replace(PRODUCT, load_bytes=128)),
        ("note", "loads in flight 256 to 128 bytes a thread"),
    ),
    "a_few_exchanges_more": (
        (PRODUCT, loop_of(PRODUCT, shared_loads=8, all=104)),
        ("note", "more exchange between threads in the inner loop: shared loads 4 to 8"),
    ),
    "tensor_core_lost": (
        (PRODUCT, replace(PRODUCT, instructions={"FFMA": 512})),
        ("severe", "no tensor core instead of 8 HGMMA"),
    ),
    "older_tensor_core": (
        (PRODUCT, replace(PRODUCT, instructions={"HMMA": 64})),
        ("severe", "64 HMMA instead of 8 HGMMA"),
    ),
    "newer_tensor_core": (
        (replace(PRODUCT, instructions={"HMMA": 64}), PRODUCT),
        ("better", "8 HGMMA instead of 64 HMMA"),
    ),
    "tma_lost": (
        (replace(ROWS, instructions={"UTMALDG": 2}), replace(ROWS, instructions={"LDG": 8})),
        ("severe", "nothing is copied by TMA: UTMALDG is gone"),
    ),
    "spills_in_the_loop": (
        (PRODUCT, replace(loop_of(PRODUCT, spills=6), spills=9)),
        ("severe", "registers spill in the inner loop: 0 to 6 accesses a turn"),
    ),
    "spills_elsewhere": (
        (PRODUCT, replace(PRODUCT, spills=9)),
        ("worse", "registers spill: 0 to 9 accesses"),
    ),
    "narrower_loads": (
        (ROWS, replace(ROWS, instructions=ROWS.instructions | {"LDG": 16, "LDG.64": 16, "LDG.128": 0})),
        ("worse", "a load is narrower: 16 x 8 bytes instead of 8 x 16"),
    ),
    "some_narrower_stores": (
        (ROWS, replace(ROWS, instructions=ROWS.instructions | {"STG": 20, "STG.128": 4})),
        ("worse", "a store is narrower: 4 x 16 and 16 x 4 bytes instead of 8 x 16"),
    ),
    "narrower_of_the_narrow": (
        (
            replace(ROWS, instructions={"LDG": 6, "LDG.128": 2}),
            replace(ROWS, instructions={"LDG": 10, "LDG.128": 2, "LDG.U16": 8}),
        ),
        ("worse", "a load is narrower: 2 x 16 and 8 x 2 bytes instead of 2 x 16 and 4 x 4"),
    ),
    "wider_loads": (
        (replace(ROWS, instructions=ROWS.instructions | {"LDG": 16, "LDG.64": 16, "LDG.128": 0}), ROWS),
        ("better", "a load is wider: 8 x 16 bytes instead of 16 x 8"),
    ),
    "scalar_loads_beside": (
        (ROWS, replace(ROWS, instructions=ROWS.instructions | {"LDG": 14})),
        ("note", "other instructions: LDG 14, was 8"),
    ),
    "loads_one_by_one": (
        (ROWS, replace(ROWS, load_bytes=16, load_waits=8)),
        ("worse", "loads in flight 128 to 16 bytes a thread"),
    ),
    "loads_in_more_turns": (
        (ROWS, replace(ROWS, load_waits=4)),
        ("worse", "loads are awaited 4 times one after the other instead of 1"),
    ),
    "a_conversion_of_layout": (
        (PRODUCT, loop_of(PRODUCT, shared_stores=16, shared_loads=20, barriers=4)),
        ("worse", "a round trip through shared memory between threads in the inner loop: "),
    ),
    "one_barrier_more": (
        (PRODUCT, loop_of(PRODUCT, barriers=3)),
        ("note", "more exchange between threads in the inner loop: barriers 2 to 3"),
    ),
    "a_longer_loop": (
        (PRODUCT, loop_of(PRODUCT, all=120, others=100)),
        ("worse", "the inner loop grew by 20 %, 100 to 120 instructions: others 80 to 100"),
    ),
    "costlier_arithmetic": (
        (PRODUCT, loop_of(PRODUCT, all=102, special_functions=2)),
        ("worse", "the inner loop grew by 2 %, 100 to 102 instructions: special functions 0 to 2"),
    ),
    "unrolled": (
        (PRODUCT, loop_of(PRODUCT, **{name: 2 * count for name, count in PRODUCT.loop.items()})),
        ("note", "other instructions: all in the loop 200, was 100, "),
    ),
    "a_shorter_loop": (
        (PRODUCT, loop_of(PRODUCT, all=90, others=70)),
        ("better", "the inner loop has 10 % fewer instructions: 100 to 90"),
    ),
    "a_longer_epilogue": (
        (
            replace(PRODUCT, rest={"floats": 64}),
            replace(PRODUCT, rest={"floats": 300, "special functions": 32}),
        ),
        ("worse", "what lies outside the inner loop grew: floats 64 to 300, special functions 0 to 32"),
    ),
    "an_epilogue_of_slower_kinds": (
        (PRODUCT, replace(PRODUCT, instructions=PRODUCT.instructions | {"all": 1140, "FFMA": 96})),
        ("worse", "what lies outside the inner loop grew, 800 to 1,040 instructions: FFMA 0 to 96"),
    ),
    "an_epilogue_of_half_the_threads": (
        (replace(PRODUCT, rest={"floats": 64}), replace(PRODUCT, rest={"floats": 128}, threads=128)),
        ("worse", "256 to 128 threads a block: occupancy 12 to 6 %"),
    ),
    "a_little_more_of_an_epilogue": (
        (replace(PRODUCT, rest={"stores": 4}), replace(PRODUCT, rest={"stores": 16})),
        ("note", "other instructions: stores outside 16, was 4"),
    ),
    "a_loop_around_that_of_depth": (
        (replace(PRODUCT, tile_loops=1), replace(PRODUCT, tile_loops=2)),
        ("worse", "the loop over tiles is no longer one with that over depth: "),
    ),
    "no_loop_around_that_of_depth": (
        (replace(PRODUCT, tile_loops=2), replace(PRODUCT, tile_loops=1)),
        ("better", "the loop over tiles is one with that over depth"),
    ),
    "other_code": (
        (PRODUCT, replace(PRODUCT, instructions=PRODUCT.instructions | {"all": 901})),
        ("note", "other instructions: all 901, was 900"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_by_its_cause(name):
    pair, expected = CHANGES[name]
    found = changes(*pair, "sm_90")
    if expected is None:
        assert found == []
    else:
        severity, text = expected
        assert found[0].severity == severity
        assert found[0].text.startswith(text)


def test_worst_comes_first_and_equal_facts_have_no_changes():
    worse = replace(PRODUCT, registers=191, in_flight=0, pipeline=(2, 2))
    found = changes(PRODUCT, worse, "sm_90")
    assert [(one.what, one.severity) for one in found] == [
        ("pipeline", "worse"),
        ("products", "worse"),
        ("registers", "note"),
    ]
    assert [one.what for one in at_least(found, "worse")] == ["pipeline", "products"]
    assert changes(PRODUCT, PRODUCT, "sm_90") == []
