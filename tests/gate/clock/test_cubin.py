"""What is read of a cubin, and which are refused."""

from __future__ import annotations

import re
import struct

import pytest

from tests.compiled import assembly_of
from tpkernels.gate import disassembly
from tpkernels.gate.clock.cubin import Cubin, KernelParameter, WrongArchitecture, parse, read
from tpkernels.gate.clock.values import Constants
from tpkernels.gate.disassembly import NoDisassembler, disassemble, disassemble_ahead, sass_mix
from tpkernels.registered.entries import entry_specs

FLAT = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
NORM = "norm_fwd/pointer/bf16/8192/rms"
ENTROPY = "softmax_statistics/pointer/bf16/2048/entropy"


@pytest.fixture(scope="module")
def flat(compiler):
    return read(compiler.run(assembly_of, entry_specs()[FLAT].entry()).cubin)


def elf(machine: int, flags: int) -> bytes:
    header = bytearray(64)
    header[:8] = b"\x7fELF\x02\x01\x01\x33"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<I", header, 48, flags)
    return bytes(header)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no ELF file"),
        (b"not a cubin" * 9, "no ELF file"),
        (elf(62, 0), "ELF machine 62"),
        (elf(190, 0x500050), "one of sm_80"),
        (elf(190, 0x640064), "one of sm_100"),
    ],
)
def test_cubin_of_another_architecture_is_refused(content: bytes, told: str):
    with pytest.raises(WrongArchitecture, match=told):
        read(content)


def test_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disassembly, "_tool", lambda name: f"/nowhere/{name}")
    with pytest.raises(NoDisassembler, match="cuobjdump, which Triton brings along, is missing"):
        disassemble(b"")


def test_what_the_disassembler_says_of_nonsense_is_passed_on():
    with pytest.raises(NoDisassembler, match="cuobjdump"):
        disassemble(elf(190, 0x5A005A))


def test_kernels_disassembled_at_once_read_as_each_alone(compiler):
    """Jumps, calls, returns and loops among them."""
    names = (NORM, FLAT, ENTROPY, NORM)
    cubins = [compiler.run(assembly_of, entry_specs()[name].entry()).cubin for name in names]
    alone = [disassemble(cubin) for cubin in cubins]
    disassemble_ahead(cubins)
    assert set(disassembly._listings) == set(cubins)
    for cubin, listing in zip(cubins, alone, strict=True):
        assert parse(disassemble(cubin)) == parse(listing)
        assert sass_mix(disassemble(cubin)) == sass_mix(listing)
        assert read(cubin).registers == int(re.search(r"REG:(\d+)", listing)[1])


def test_parameters_have_their_places_and_as_many_arguments_are_expected(flat):
    assert flat.parameters[:3] == (
        KernelParameter(0x240, 128),
        KernelParameter(0x2C0, 4),
        KernelParameter(0x2C4, 4),
    )
    assert (flat.parameters_at, len(flat.parameters)) == (0x210, 28)
    with pytest.raises(ValueError, match="takes 28 parameters, got 1 arguments"):
        Constants.of(flat, [0], (1, 1, 1), 256)


def test_words_of_an_unknown_argument_are_unknown():
    code = Cubin("kernel", (), 32, (KernelParameter(0x210, 8), KernelParameter(0x218, 4)), 0x210, {})
    constants = Constants.of(code, [None, 7], (1, 1, 1), 32)
    assert [constants.word(0, offset) for offset in (0x210, 0x214, 0x218)] == [None, None, 7]


LISTING = """
        /*0190*/                   BRX R2 -0x1a0 ;    /* 0xfffffffc02987949 */
            /* 0x000fea000383ffff */
        /*01a0*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64.reuse+0x10] ;    /* 0x0000000402047981 */
            /* 0x008ea2000c1e1d00 */
        /*01b0*/                   IADD3 R2, P6, R7.reuse, c[0x0][0x210], RZ ;    /* 0x0000000402047981 */
            /* 0x000fc40007ffe0ff */
        /*01c0*/               @PT NOP;    /* 0x0000000000007918 */
            /* 0x000fc00000000000 */
"""


def test_operands_and_control_fields_are_read_off_a_listing():
    assert [(one.opcode, one.modifiers, one.guard, one.operands) for one in parse(LISTING)] == [
        ("BRX", (), "", ("R2 -0x1a0",)),
        ("LDG", ("E", "128"), "!P0", ("R4", "desc[UR6][R2.64+0x10]")),
        ("IADD3", (), "", ("R2", "P6", "R7", "c[0x0][0x210]", "RZ")),
        ("NOP", (), "", ()),
    ]
    fields = [(one.stall, one.writes, one.reads, one.waits) for one in parse(LISTING)]
    assert fields == [(5, None, None, ()), (1, 2, None, (3,)), (2, None, None, ()), (0, None, None, ())]
    assert str(parse(LISTING)[1]) == "0x01a0 @!P0 LDG.E.128 R4, desc[UR6][R2.64+0x10]"
