"""What a run says and writes of its speed, its memory and one of its steps."""

import json

import pytest

from tests.cli.living_ranks import train_on


def test_speed_memory_and_trace(tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "traces"
    run = train_on(ranks2, *f"--tp 2 --steps 5 --peak-tflops 2 --profile {folder} --json {lines}".split())
    assert run.returncode == 0, run.stderr
    assert " on each of 2 ranks: MFU 0.0 % of 2 TFLOP/s" in run.stdout
    assert "peak resident set of the process" in run.stdout
    assert f"profile of step 4: {folder}/step-00000004-rank-*.json" in run.stdout
    assert [path.name for path in sorted(folder.iterdir())] == [
        "step-00000004-rank-0.json",
        "step-00000004-rank-1.json",
    ]
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    for report in reports:
        assert report["mfu"] == pytest.approx(report["tflops_per_rank"] / 2)
        # 2 x (256 x 16 of the head, 2 x 16 x 16 + 2 x 16 x 8 of attention, 3 x 16 x 64 of the MLP, scores)
        flops = 6 * (256 * 16 + 2 * 256 + 2 * 128 + 3 * 16 * 64 + 2 * 16 * 16)
        speed = flops * report["tokens"] / report["seconds"] / 2
        assert report["tflops_per_rank"] == pytest.approx(speed / 1e12)
    assert ["memory" in report for report in reports] == [False] * 4 + [True]
    assert {"rank", "weights", "gradients", "optimizer", "peak", "peak_is"} == set(reports[-1]["memory"])


def test_profile_goes_before_the_time_line_of_a_page(tmp_path, ranks1):
    """A step has one profiler; here both would be of the last one."""
    page, folder = tmp_path / "index.html", tmp_path / "traces"
    run = train_on(ranks1, *f"--steps 2 --profile {folder} --page {page}".split())
    assert run.returncode == 0, run.stderr
    assert [path.name for path in folder.iterdir()] == ["step-00000002-rank-0.json"]
    html = page.read_text(encoding="utf-8")
    assert "<h2>Loss</h2>" in html
    assert "One step" not in html
