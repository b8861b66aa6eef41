"""Checkpoints come back to the bit at another number of ranks, and an unfinished one is never taken."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.interop.checkpoint_cases import (
    fail_while_writing,
    load_all,
    load_vocabulary,
    refuse,
    save_all,
    save_alone,
    save_vocabulary,
)
from tests.ranks import RankPool
from tpkernels.interop import dcp


@pytest.fixture(scope="module")
def saved_by_4(ranks4, tmp_path_factory):
    """A checkpoint of each kind, saved at tensor size 4, and what each rank drew afterwards."""
    folder = tmp_path_factory.mktemp("saved-by-4")
    return folder, ranks4.run(save_all, str(folder), 4)


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2), (4, 2)])
def test_ranks_load_what_four_saved(ranks, tensor, saved_by_4, request):
    for wrong, _, warned in request.getfixturevalue(f"ranks{ranks}").run(
        load_all, str(saved_by_4[0]), tensor
    ):
        assert wrong == []
        assert "random streams stay as they are" in warned[0]


def test_the_same_ranks_draw_on_where_they_were(saved_by_4, ranks4):
    folder, drawn = saved_by_4
    # the first kind was saved before the others were built, which draw from the default stream
    results = ranks4.run(load_all, str(folder), 4)
    for (wrong, draws, warned), expected in zip(results, drawn, strict=True):
        assert (wrong, warned) == ([], [])
        assert draws.keys() == expected.keys() != set()
        assert {stream for stream in draws if draws[stream] != expected[stream]} <= {"default"}
    assert len({draws["model-parallel-rng"] for _, draws, _ in results}) == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_four_load_what_fewer_saved(ranks, request, ranks4, tmp_path):
    request.getfixturevalue(f"ranks{ranks}").run(save_all, str(tmp_path), ranks)
    assert [wrong for wrong, _, _ in ranks4.run(load_all, str(tmp_path), 4)] == [[]] * 4


def test_checkpoint_holds_whole_tensors_without_padding(saved_by_4, tmp_path):
    folder, _ = saved_by_4
    entries = FileSystemReader(folder / "odd").read_metadata().state_dict_metadata
    sizes = {name: tuple(entry.size) for name, entry in entries.items() if name.startswith("model.")}
    of_layers = {"table.weight": (7, 4), "fused.weight": (24, 4), "fused.bias": (24,), "back.weight": (4, 24)}
    of_layers |= {"back.bias": (4,), "plain.weight": (4, 4), "plain.bias": (4,), "steps": ()}
    assert sizes == {f"model.{name}": size for name, size in of_layers.items()}
    assert tuple(entries["optimizer.state.table.weight.exp_avg"].size) == (7, 4)
    assert not [name for name in entries if "optimizer.state.back.bias" in name]  # frozen
    dcp_to_torch_save(folder / "odd", tmp_path / "odd.pt")  # readable by torch's tools
    whole = torch.load(tmp_path / "odd.pt", weights_only=False)
    assert whole["extra"] == {"step": 2, "kind": "odd"}
    assert whole["model.fused.weight"].shape == (24, 4)


def test_vocabulary_saved_by_four_is_loaded_by_three_and_one(ranks4, ranks1, tmp_path):
    ranks4.run(save_vocabulary, str(tmp_path / "table"))
    with RankPool(3) as ranks3:
        assert ranks3.run(load_vocabulary, str(tmp_path / "table")) == [True] * 3
    assert ranks1.run(load_vocabulary, str(tmp_path / "table")) == [True]


def test_unfinished_checkpoint_is_never_taken(ranks2, tmp_path):
    for failed, after, latest, again in ranks2.run(fail_while_writing, str(tmp_path)):
        assert failed.startswith("RuntimeError")
        assert failed.endswith("on rank 0: OSError: no space left")
        assert after == (tmp_path / "good", False)
        assert latest == tmp_path / "next"
        assert again[0] == "FileExistsError"


def test_a_rank_that_stays_away_is_no_hang(ranks2, tmp_path):
    (kind, text), _ = ranks2.run(save_alone, str(tmp_path))
    assert kind == "RuntimeError"
    assert "a rank died, came too late, or left the common order of calls" in text
    assert list(tmp_path.iterdir()) == []


def test_latest_names_the_last_complete_one(tmp_path):
    assert dcp.latest(tmp_path) is None
    assert dcp.latest(tmp_path / "absent") is None
    for text, named in ((b"gone\n", "'gone'"), (b"", "''"), (b"\xff", "'\ufffd'")):
        (tmp_path / "latest").write_bytes(text)
        with pytest.raises(FileNotFoundError, match=f"names {named}, which is not there"):
            dcp.latest(tmp_path)


def test_wrong_calls_are_refused_on_all_ranks_alike(ranks2, tmp_path):
    first, second = ranks2.run(refuse, str(tmp_path))
    assert first == second
