"""What cannot fit is refused before anything is allocated; FLOPs and bytes of a run are those that were."""

import pytest
import torch

from tests.training.small import CPU, config_for
from tpkernels.models.config import model_config
from tpkernels.training import measures
from tpkernels.training.measures import (
    Speed,
    known_peak,
    least_bytes,
    peak_memory,
    require_room,
)
from tpkernels.training.trainer import StepReport


def config_of(tmp_path, *, batch=4, tokens=16, **sizes):
    config = config_for(tmp_path / "text.txt", dtype=torch.float32)
    model = model_config("gpt2-small", max_positions=None, **sizes)
    return type(config)(model=model, data=config.data, steps=1, batch=batch, tokens=tokens)


@pytest.mark.parametrize(
    "huge",
    [
        {"vocab_size": 9999999999999},
        {"num_layers": 10**9},
        {"ffn_hidden_size": 10**400},
        {"batch": 10**12},
        {"tokens": 10**12},
    ],
    ids=str,
)
def test_huge_sizes_are_refused_with_the_memory_they_need(huge, tmp_path):
    with pytest.raises(
        ValueError, match=r"^a rank needs at least [\d,.]+ GiB .* this machine has [\d.]+ GiB"
    ):
        require_room(config_of(tmp_path, **huge), 1, 1, local=1, device=CPU)


def test_ranks_of_a_machine_share_its_memory(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    needed = least_bytes(config, 1, 2) + measures.PROCESS
    monkeypatch.setattr(measures, "memory_of_machine", lambda: 2 * needed)
    require_room(config, 1, 2, local=2, device=CPU)
    with pytest.raises(ValueError, match=r"^3 ranks need at least"):
        require_room(config, 1, 2, local=3, device=CPU)


def test_mfu_is_work_over_time_and_peak():
    report = StepReport(1, 5.0, 1.0, 0.1, seconds=0.5, tokens=1000)
    speed = Speed(flops_per_token=10**9, ranks=4, peak=2e12)
    assert speed.of(report) == pytest.approx({"tflops_per_rank": 0.5, "mfu": 0.25})
    assert speed.line(report) == "500 GFLOP/s on each of 4 ranks: MFU 25.0 % of 2 TFLOP/s"
    unknown = Speed(flops_per_token=10**9, ranks=4, peak=None)
    assert unknown.of(report) == pytest.approx({"tflops_per_rank": 0.5})
    assert "no MFU" in unknown.line(report)


def test_peaks_are_those_of_the_data_sheets_and_of_bfloat16_alone(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert known_peak(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert known_peak(gpu, torch.bfloat16) == 989e12
    assert known_peak(gpu, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    assert known_peak(gpu, torch.bfloat16) is None


def test_peak_of_a_process_is_more_than_torch_alone():
    assert measures.PROCESS < peak_memory(CPU) < measures.memory_of_machine()
