"""Planted faults of compilers are told, their absence is not, and assemblers are known by version."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.compiled import Compiler, assembly_of
from tests.gate.samples import entry_of
from tpkernels.gate.compiler_faults import FAULTS, NVIDIA, Ptxas, miscompiled, ptxas_in_use, ptxas_of
from tpkernels.gate.disassembly import disassemble
from tpkernels.gate.products_in_flight import raced_products

OLD = Ptxas("/old/ptxas", (12, 8, 93), "TRITON_PTXAS_PATH")
NEW = Ptxas("/new/ptxas", (13, 4, 59), "TRITON_PTXAS_PATH")
LOOP = """
        /*0000*/                   LDS.U16 R152, [R8] ;
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0 ;
        /*0030*/                   IADD3 R8, R8, 0x20, RZ ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/              @!P0 BRA 0x0 ;
        /*0060*/                   FADD R24, R24, R25 ;
        /*0070*/                   EXIT ;
"""
MEANWHILE = "IADD3 R8, R8, 0x20, RZ"
RACES = {  # instead of what is done while the product runs: what is told; "": nothing
    MEANWHILE: "",
    "IADD3 R153, R8, 0x20, RZ": "R153 of `HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0` at 0x20",
    "LDS.64 R151, [R9]": "R152",
    "LDS.128 R149, [R9]": "R152",
    "IMAD.WIDE R150, R2, 0x4, R4": "",
    "@P1 MOV R155, R9": "R155",
    "SHFL.BFLY PT, R154, R9, 0x1, 0x1f": "R154",
    "MOV R156, R9": "",
    "IADD3 R9, R152, 0x1, RZ": "",
    "STS [R9], R152": "",
    "ISETP.NE.AND P1, PT, R152, RZ, PT": "",
    "FADD R9, R55, R8": "R55",
    "STS [R9], R24": "is read by `STS [R9], R24` at 0x30",
    "FADD R9, R56, R8": "",
    "CS2R R54, SRZ": "is written by `CS2R R54, SRZ`",
    "@P1 BRA 0x60": "is written by `FADD R24, R24, R25` at 0x60",
    "@P1 BRA 0x50": "is written by `LDS.U16 R152, [R8]` at 0x0",
    "HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR4], R24, gsb0": "",
    "HGMMA.64x64x16.F32.BF16 R60, R24, gdesc[UR4], R60, gsb0": "R24",
}


@pytest.mark.parametrize("meanwhile", RACES)
def test_registers_of_a_product_in_flight_are_left_alone(meanwhile):
    told = "\n".join(raced_products(LOOP.replace(MEANWHILE, meanwhile)))
    assert RACES[meanwhile] in told
    assert bool(told) == bool(RACES[meanwhile])


def test_a_wait_that_allows_one_batch_leaves_it_for_the_next_turn():
    assert "is written by `LDS.U16 R152" in raced_products(LOOP.replace("gsb0, 0x0", "gsb0, 0x1"))[0]
    last = LOOP.replace("@!P0 BRA 0x0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;")
    assert raced_products(last.replace("gsb0, 0x0", "gsb0, 0x1", 1)) == ()


def test_sums_of_16_bits_take_half_the_registers():
    half = LOOP.replace("F32.BF16", "F16").replace("FADD R24, R24, R25", "NOP").replace("R8, R8", "R40, R8")
    assert raced_products(half) == ()
    assert raced_products(half.replace("R40, R8", "R39, R8"))


LINEAR = entry_of("linear/descriptor/bf16/128x128x64-w4-s3-p2-x2/gelu_tanh+bias+z")


@pytest.mark.parametrize("edit", ["wait", "sum"])
def test_one_edit_of_a_real_kernel_is_told(edit, compiler: Compiler):
    listing = disassemble(compiler.run(assembly_of, LINEAR).cubin)
    assert raced_products(listing) == ()
    if edit == "wait":  # the last, before the epilogue
        at = listing.rindex("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        edited = listing[:at] + listing[at:].replace("gsb0, 0x0", "gsb0, 0x1", 1)
    else:  # what adds to an offset behind a product adds to its sum
        at = listing.index("HGMMA")
        (register,) = re.findall(r"HGMMA\S* (R\d+)", listing[at : at + 60])
        edited = listing[:at] + re.sub(r"\bNOP|UIADD3\S* UR\d+", f"IADD3 {register}", listing[at:], count=1)
    assert edited != listing
    assert raced_products(edited)


PACKED = "VIADD.16x2 R4, R4.reuse, 0x0 ;"
PTX = "mul.f32 %f1, %f2, 0f3FB8AA3B;\nfma.rn.ftz.f32 %f3, %f1, 0fBD3714B2, 0f3F000000;"
SASS = "FMUL R1, R2, 1.4426950216293334961 ;\nFFMA R3, R1, -R9, 0.5 ;\nUMOV UR9, 0x3d3714b2 ;"
HALVES = "HFMA2.MMA R9, -RZ, RZ, 1.3037109375, 0.00114631652832"
NEG = "neg.s32 %r3, %r1;"
MASKS = """
        @P2 LOP3.LUT R238, R238, 0x4000000, RZ, 0xfc, !PT ;
        @P3 LDG.E.U16 R5, desc[UR48][R6.64] ;
        STS.U16 [R95+UR44+0x9e00], R5 ;
"""
PRODUCT = LOOP.replace("R24, R152", "R24, gdesc[UR8]")
FOUND = {  # PTX, SASS, architecture, ptxas, what is told; "": nothing
    "packed": ("", PACKED, "sm_90", OLD, "adds nothing"),
    "packed_on_blackwell": ("", PACKED, "sm_120", NEW, "adds nothing"),
    "packed_zero": ("", PACKED.replace("0x0", "RZ"), "sm_90", OLD, ""),
    "packed_half": ("", PACKED.replace("0x0", "0x1"), "sm_90", NEW, ""),
    "constants": (PTX, SASS, "sm_80", OLD, ""),
    "product_lost": (PTX, SASS.replace("1.44", "1.43"), "sm_80", OLD, "the constant 1.44269502 of an fp32"),
    "sum_lost": (PTX, SASS.replace("0x3d3714b2", "0x0"), "sm_100", OLD, "the constant 0.0446974"),
    "halves": (PTX, SASS.replace("UMOV UR9, 0x3d3714b2", HALVES), "sm_90", OLD, ""),
    "few_bits": (PTX, SASS.replace("0.5", "R7"), "sm_90", OLD, ""),
    "never_used": (f"mov.pred %p2, 0;\n{PTX}", "", "sm_90", OLD, ""),
    "negation": (NEG, "VIMNMX3 R5, R0, R0, R5, !PT ;", "sm_100", OLD, "the negation in max"),
    "negated": (NEG, "VIMNMX3 R5, R0, R4, R5, !PT ;", "sm_100", OLD, ""),
    "masks": ("", PRODUCT + MASKS, "sm_90", OLD, "1 masks of 16-bit loads"),
    "masks_by_newer": ("", PRODUCT + MASKS, "sm_90", NEW, ""),
    "masks_elsewhere": ("", PRODUCT + MASKS, "sm_80", OLD, ""),
    "no_masks": ("", PRODUCT + MASKS.replace("LOP3", "NOP"), "sm_90", OLD, ""),
    "masks_without_product": ("", MASKS, "sm_90", OLD, ""),
    "race": ("", LOOP.replace("0x0 ;", "0x1 ;", 1), "sm_90", NEW, "before it is awaited"),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_shows_a_fault_is_told(case):
    ptx, sass, architecture, ptxas, told = FOUND[case]
    found = miscompiled(ptx, sass, architecture, ptxas)
    assert told in "\n".join(found)
    assert bool(found) == bool(told)


def test_a_finding_names_version_report_and_cure():
    (found,) = miscompiled("", PACKED, "sm_90", OLD)
    report = "ptxas 12.8 until 13.3 is known for it (github.com/triton-lang/triton/issues/11581)"
    assert f"; {report}, this is 12.8.93: set TRITON_PTXAS_PATH to that of CUDA 13.3 or later" in found
    (found,) = miscompiled("", PACKED, "sm_90", NEW)
    assert found.endswith("this is 13.4.59")
    assert all(fault.first < fault.fixed for fault in FAULTS if fault.report)


PROGRAM = """.version 8.6
.target {target}
.address_size 64
.visible .entry kernel(.param .u64 p) {{
.reg .b32 %r<9>; .reg .b64 %rd<2>; .reg .b16 %rs<3>;
ld.param.b64 %rd1, [p];
ld.global.b32 %r1, [%rd1];
{code}
exit;
}}
"""
LOW_HALF = """mov.b32 %r2, 65537;
add.s16x2 %r3, %r1, %r2;
mov.b32 {%rs1, %rs2}, %r3;
st.global.b16 [%rd1+8], %rs1;"""
ABSOLUTE = """ld.global.b32 %r2, [%rd1+4];
neg.s32 %r3, %r1;
max.s32 %r4, %r1, %r3;
max.s32 %r5, %r4, %r2;
st.global.b32 [%rd1+8], %r5;"""


@pytest.mark.parametrize(
    ("code", "target", "report"), [(LOW_HALF, "sm_90a", "/11581"), (ABSOLUTE, "sm_100a", "/190973")]
)
def test_what_this_ptxas_makes_of_a_report_is_told_by_its_version(code, target, report, tmp_path):
    architecture = target.removesuffix("a")
    ptxas, ptx = ptxas_of(architecture), PROGRAM.format(code=code, target=target)
    (tmp_path / "kernel.ptx").write_text(ptx)
    subprocess.run(
        [ptxas.path, f"--gpu-name={target}", "kernel.ptx", "-o", "cubin"], cwd=tmp_path, check=True
    )
    (fault,) = (one for one in FAULTS if one.report.endswith(report))
    found = miscompiled(ptx, disassemble((tmp_path / "cubin").read_bytes()), architecture, ptxas)
    assert bool(found) == (fault.first <= ptxas.version < fault.fixed)


def ptxas_that(edits: str, folder: Path) -> Path:
    """An assembler that changes what it is given by a script of sed, and tells so with its version."""
    path = folder / "ptxas"
    path.write_text(
        f"""#!/bin/sh
for word; do case $word in *.ptx) sed -i '{edits}' "$word";; esac; done
[ "$1" = --version ] && echo '{edits}'
exec {ptxas_of("sm_90").path} "$@"
"""
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("constant", ["3D922279", "00000000"])
def test_check_tells_of_a_compiler_that_loses_a_constant(constant, compiler: Compiler, tmp_path):
    assembler = str(ptxas_that(f"s/0f3D922279/0f{constant}/", tmp_path))
    words = ("--arch", "sm_90", "--skip", "numerics", "--only", "activate/pointer/bf16/32x128/gelu_tanh")
    ended = compiler.command(tmp_path, "check", *words, **{ptxas_of("sm_90").variable: assembler})
    assert f"ptxas {ptxas_of('sm_90')} for " in ended.stdout
    assert f"({assembler})" in ended.stdout
    lost = "the constant 0.0713548139 of an fp32 sum or product in PTX is lost: it is nowhere in SASS"
    assert (lost in ended.stdout) == (constant == "00000000") == bool(ended.returncode)


def test_assemblers_are_named_by_version_gpus_and_path(monkeypatch):
    line = ptxas_in_use()
    for architecture in NVIDIA:
        ptxas = ptxas_of(architecture)
        assert f"{ptxas} for " in line
        assert f"({ptxas.path})" in line
        assert architecture in line
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas", lambda _: SimpleNamespace(path="/none"))
    assert ptxas_in_use().startswith("cannot be asked: ")
