"""`python -m tpkernels plan --model`, as a user types it."""

import functools
import io
import json
import re
from contextlib import redirect_stdout

import pytest

from tpkernels.cli import main

USUAL = ["plan", "--model", "llama3-70b", "--world-size", "64", "--gpu", "h100"]
ROW = re.compile(
    r"^ +(\d+) +(\d+) +(\d+) ( +[\d.]+){10}( +lacks [\d.]+ GB)?(,? +not for `train`: stages)?$", re.MULTILINE
)


def rows(printed):
    """(layout, numbers, whether it fits) of each line of the table"""
    found = []
    for match in ROW.finditer(printed):
        words = match.group().split()
        numbers = [float(word) for word in words[3:13]]
        found.append((tuple(map(int, words[:3])), numbers, match.group(5) is None))
    return found


def test_table_is_sorted_adds_up_and_holds_what_fits(capsys):
    assert main(USUAL) == 0
    printed = capsys.readouterr().out
    table = rows(printed)
    assert table
    for (tensor, pipeline, data), numbers, fits in table:
        weights, gradients, optimizer, activations, update, peak, compute, exposed, bubble, step = numbers
        assert tensor * pipeline * data == 64
        assert fits
        assert peak <= 80 * 0.9
        assert peak == pytest.approx(weights + gradients + optimizer + max(activations, update), abs=0.3)
        assert step == pytest.approx(compute + exposed + bubble, abs=0.002)
    assert [row[1][-1] for row in table] == sorted(row[1][-1] for row in table)
    assert re.search(r"do not fit: \d+; tp=\d+ pp=\d+ dp=\d+ lacks \d+\.\d GB, the least", printed)
    assert f"fit: {len(table)}\n" in printed
    assert "Predicted from sizes; nothing was measured." in printed
    assert "products reach 0.50 of 989 TFLOPS (--efficiency)" in printed
    assert "pp: more than one stage is planned only, `train` does not run it" in printed
    assert main([*USUAL, "--top", "1"]) == 0
    assert rows(capsys.readouterr().out) == table[:1]


def best(printed):
    """What the line about `train` says."""
    (line,) = re.findall("^best for `train`: (.*)$", printed, re.MULTILINE)
    return line


@pytest.mark.parametrize(
    "options", [[], ["--recompute", "full", "--efficiency", "0.9"], ["--all"]], ids=["none", "some", "all"]
)
def test_best_is_the_first_that_fits_and_that_train_runs(options, capsys):
    main([*USUAL, *options])
    printed = capsys.readouterr().out
    flat = [(layout, numbers) for layout, numbers, fits in rows(printed) if fits and layout[1] == 1]
    if flat:
        (tensor, stages, data), numbers = flat[0]
        assert best(printed) == f"tp={tensor} pp={stages} dp={data}, {numbers[-1]:.3f} s"
        shared = [f"{3 * 2 * 8192 * 8192 * 2 / 1e9:.1f}"] if tensor > 1 else []  # 8192 tokens and features
        assert re.findall("^beyond its peak: (.*) GB of symmetric memory", printed, re.MULTILINE) == shared
    else:
        why = "no layout without pipeline stages fits; tp=8 pp=1 dp=8 lacks 12.6 GB"
        assert best(printed) == f"none, because {why}"


def test_every_layout_that_train_does_not_run_says_so(capsys):
    main([*USUAL, "--all"])
    printed = capsys.readouterr().out
    lines = [match.group() for match in ROW.finditer(printed)]
    trains = [layout[1] == 1 for layout, *_ in rows(printed)]
    assert {True, False} == {*trains}
    assert [line.endswith("not for `train`: stages") for line in lines] == [not able for able in trains]


def test_nothing_fits(capsys):
    assert main(["plan", "--model", "gpt3-175b", "--world-size", "8", "--gpu", "a100"]) == 1
    printed = capsys.readouterr().out
    assert "no layout fits" in printed
    assert "fit: 0\ndo not fit: " in printed
    assert not rows(printed)


def test_json_holds_what_is_printed_and_more(tmp_path, capsys):
    path = tmp_path / "advice.json"
    assert main([*USUAL, "--json", str(path)]) == 0
    table = rows(capsys.readouterr().out)
    found = json.loads(path.read_text())
    assert found["machine"]["efficiency"] == 0.5
    assert found["job"]["model"]["hidden_size"] == 8192
    assert found["too_large"]
    for one, (layout, numbers, _) in zip(found["fitting"], table, strict=True):
        assert tuple(one["layout"].values()) == layout
        assert [size / 1e9 for size in one["memory"].values()] == pytest.approx(numbers[:5], abs=0.06)
        assert list(one["time"].values()) == pytest.approx(numbers[6:9], abs=0.0006)
    assert [set(layout) for layout, _ in found["impossible"]] == [{"tensor", "pipeline", "data"}] * 3


OPTIONS = {
    "tokens": ["--tokens", "4096"],
    "batch": ["--batch", "1024"],
    "micro_batch": ["--micro-batch", "2"],
    "full": ["--recompute", "full"],
    "selective": ["--recompute", "selective"],
    "whole_tokens": ["--no-sequence-parallel"],
    "size": ["--size", "num_layers=40", "--size", "activation=gelu"],
    "nodes": ["--gpus-per-node", "4"],
    "wide": ["--max-tp", "16", "--size", "num_kv_heads=16"],
    "efficiency": ["--efficiency", "0.6"],
    "links": ["--link-efficiency", "0.5"],
    "gpu": ["--gpu", "h200"],
    "reserve": ["--reserve", "0.02"],
}


@functools.cache
def table_of(*options):
    with redirect_stdout(io.StringIO()) as printed:
        main([*USUAL, "--all", *options])
    return rows(printed.getvalue())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_changes_the_table(options):
    assert table_of(*options) != table_of()
