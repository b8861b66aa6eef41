"""Bad use of any command is refused in one line, with exit code 2, before anything is done."""

import re
import shlex

import pytest
import torch

from bench.__main__ import main as bench
from tests.programs import ran
from tpkernels.cli import main

PLAN_OF_A_MODEL = "plan --model llama3-70b --world-size 64 --gpu h100"
TUNE = "tune --dry-run --shapes"
BAD = {  # the beginning of a command: {what is wrong: what is said of it, a regular expression}
    "fly": {"": "invalid choice: 'fly'"},
    "plan": {
        "--world-size 16 --tp 3": "",
        "--world-size many": "--world-size: expected at least 1, got many",
        "--tp 2": "--world-size",
        "--world-size 16 --np 2": "--np",
        "--world-size 16 --order tp-zz": "order",
        "--world-size 16 --rank 16": "",
        "--world-size 16 --svg /nowhere/plan.svg": "/nowhere",
        "--world-size 16 --svg plan.svg --gpus-per-node 0": "",
        "--world-size 999999999999": "--world-size: expected at most 10000000, got 999999999999",
        "--model llama3-8b --world-size 999999999999": "--world-size: expected at most 10000000, got 9999",
        "--model gpt2-small": "the following arguments are required: --world-size",
    },
    PLAN_OF_A_MODEL: {
        "--model llama9": "model: expected one of gpt2-small, .*llama3-70b, got 'llama9'",
        "--max-tp -1": "max_tp: expected at least 1, got -1",
        "--top 0": "--top: expected at least 1, got 0",
        "--size layers=3": "layers: a model has no such size; it has vocab_size",
        "--size num_layers": "--size: expected NAME=VALUE, got 'num_layers'",
        "--size hidden_size=wide": "hidden_size: expected a whole number of at least 1",
        "--recompute some": "argument --recompute: invalid choice: 'some'",
        "--tp 8": "unrecognized arguments: --tp 8",
        "--json /nowhere/a.json": "cannot write to '/nowhere/a.json'",
    },
    "tune": {
        "": "--shapes",
        "--shapes 1x1x1 --gpu h100": "",
        "--shapes 1x1x1": "no GPU here to time on; --dry-run lists",
        "--shapes 1x1x1 --json /nowhere/file.json": "cannot write to '/nowhere/file.json'",
    },
    TUNE: {
        "''": "expected --shapes such as 8192x4096x4096, or model:NAME with at most one tp:N .* got ''",
        "8192x4096": "got '8192x4096'",
        "0x1x1": "got '0x1x1'",
        "3000000000x3000000000x16": "--shapes 3",  # no address reaches
        "model:llama9": "NAME is one of gpt2-small, .*, qwen2.5-32b; got 'model:llama9'",
        "model:gpt2-xl,tp:2": "num_heads: expected a multiple of the 2 tensor-parallel ranks",
        "tp:8": "got 'tp:8'",
        "model:llama3-8b,tp:8,tp:4": "got 'model:llama3-8b,tp:8,tp:4'",
        "model:llama3-8b,tp:0": "got 'model:llama3-8b,tp:0'",
        "model:llama3-8b,pp:2": "got 'pp:2'",
        f"model:llama3-8b,tokens:{10**16}": "",
        "1x1x1 --steps conv": "conv",
        "1x1x1 --dtype fp8": "fp8",
        "1x1x1 --gpu tpu": "tpu",
        "1x1x1 --seconds 0": "--seconds",
        "1x1x1 --json /nowhere/file.json": "/nowhere",
        f"{10**400}x64x64": "--shapes 1",
        f"{10**12}x{10**12}x64": "--shapes 1",
    },
    "train": {"": "--data: expected a file to learn from"},
    "train --data x": {
        "--tp 0": "--tp: expected at least 1, got 0",
        "--config absent.json": "--config: ",
        "--resume": "expected a folder, --save FOLDER",
        "--model gpt5": "model: expected one of gpt2-small",
        "--steps 0 --dp 2": "steps: expected at least 1, got 0",
        "--accumulate 0": "accumulate: expected at least 1, got 0",
        "--prove -1": "--prove: expected at least 0, got -1",
        "--sample -1": "--sample: expected at least 0, got -1",
        "--save y --save-every -1": "--save-every: expected at least 0, got -1",
        "--page /": "argument --page: cannot write to '/'",
        f"--page {__file__}/page.html": "argument --page: cannot write to",
        "--prove 1 --dropout 0.1": "expected a run from the start without dropout",
        "--peak-tflops 0": "--peak-tflops: expected more than 0 and less than 1e9, got 0",
        "--timeout -1": "--timeout: expected more than 0 and less than 1e9, got -1",
        "--fp8 tensorwise": "Recipe: expected 'rowwise' or 'blockwise', with options such as",
        "--size depth=3": "depth: a model has no such size",
        "--size num_heads": "--size: expected NAME=VALUE, got 'num_heads'",
        "--max-norm -1": "max_norm: expected more than 0, got -1.0",
        "--peak-rate inf": "peak_rate: expected a number of 0 or more, got inf",
        "--size bias=maybe": "bias: expected true or false, got 'maybe'",
        "--size num_layers=true": "num_layers: expected a whole number of at least 1, got True",
        "--size rotary_base=far": "rotary_base: expected a number above 0, got 'far'",
        f"--size rotary_base={10**400}": "",
    },
    "plan --world-size 8 --model llama3-8b": {f"--size rotary_base={10**400}": ""},
    f"train --data {__file__}": {  # before anything is allocated
        "--size vocab_size=9999999999999": r"needs? at least [\d,]+ GiB of memory",
        f"--size hidden_size={10**400}": r"at least [\d,]+ GiB of memory",
        f"--size norm_eps={10**400}": "too large",
        f"--size num_layers={'9' * 5000}": "num_layers: expected a whole number",
        f"--size num_layers={'[' * 100_000}": "num_layers: expected a whole number",
        f"--size norm={'[' * 100_000}": "norm: expected one of layer_norm",
        "--dp 1000000": r"1000000 ranks need at least [\d,.]+ GiB of memory",
        "--batch 9999999999999": r"at least [\d,]+ GiB of memory",
    },
    "qualify": {
        "--seconds 0": "expected --seconds between 0 and a day, got 0",
        "--seconds nan": "expected --seconds between 0 and a day, got nan",
        "--json /nowhere/file.json": "cannot write to '/nowhere/file.json'",
        "--bogus": "--bogus",
    },
    "doctor": {"--bogus": "--bogus"},
    "check": {
        "--bits": "in a checkout of the repository run `python -m bench bits`",
        "--bits --schedules 3 --only row": "in a checkout of the repository run `python -m bench bits`",
        "--arch sm_90 --skip compile": "",
        "--update --skip compile": "",
        "--skip numerics --only linea": "linea",
        "--fast": "--fast",
        "--skip everything": "everything",
        "--json /nowhere/report.json": "cannot write to '/nowhere/report.json'",
        "--json /tmp": "cannot write to '/tmp'",
        "--config absent.toml": "absent.toml: No such file or directory",
    },
    "bench bits": {
        "--schedules 0": "argument --schedules: expected at least 1, got 0",
        "--schedules many": "argument --schedules: expected at least 1, got many",
        "--seed -1": "argument --seed: expected at least 0, got -1",
        "--world-size 1,2": "argument --world-size: expected numbers from 2 to 16 with commas between",
        "--world-size ''": "argument --world-size: expected numbers from 2 to 16",
        "--only rwo": "nothing has 'rwo' in its name, such as shared/2/row",
        "--json /nowhere/bits.json": "cannot write to '/nowhere/bits.json'",
    },
}


@pytest.mark.parametrize(
    ("command", "wrong", "said"),
    [
        pytest.param(command, wrong, said, id=f"{command[:50]}-{wrong[:50]}")
        for command, rows in BAD.items()
        for wrong, said in rows.items()
    ],
)
def test_bad_use_is_refused_in_one_line(command, wrong, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    program, _, bench_command = command.partition("bench ")
    run = bench if bench_command else main
    with pytest.raises(SystemExit) as ended:
        run(shlex.split(f"{bench_command or program} {wrong}"))
    printed, refusal = capsys.readouterr()
    assert (ended.value.code, printed, refusal.count("\n")) == (2, "", 1), refusal[:300]
    assert refusal.startswith("python -m bench" if bench_command else "python -m tpkernels")
    assert re.search(said, refusal), refusal[:300]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--arch sm_90,sm_42", "sm_42"),
        ("--skip numerics --arch sm_80 --only linear/descriptor", "linear/desc"),
    ],
    ids=["unknown_gpu", "nothing_selected"],
)
def test_check_refuses_entries_that_it_has_not(wrong, said):
    """In a process of its own: entries are compiled kernels, and these tests interpret them."""
    run = ran("-m", "tpkernels", "check", *wrong.split(), environment={"TRITON_INTERPRET": "0"})
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.stderr
    assert said in run.stderr
