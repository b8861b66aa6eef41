"""The folder of checkpoints: what cannot be used is told, what will be made again is set aside."""

import pytest

from tests.ranks import RankFailure
from tpkernels.training.folder import checkpoint_of, prepare, set_aside_after


def prepared(folder, resume):
    prepare(folder, resume=resume)


def test_a_folder_is_made_and_an_unusable_one_is_the_same_error_on_all_ranks(tmp_path, ranks2):
    ranks2.run(prepared, tmp_path / "new" / "one", False)
    assert list((tmp_path / "new" / "one").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(RankFailure) as failed:
        ranks2.run(prepared, tmp_path / "file", True)
    assert {str(error) for error in failed.value.exceptions.values()} == {
        f"--save {tmp_path / 'file'}: on rank 0: [Errno 17] File exists: '{tmp_path / 'file'}'"
    }
    assert len(failed.value.exceptions) == 2


def test_checkpoints_of_another_run_need_a_word(tmp_path, ranks2):
    checkpoint_of(tmp_path, 7).mkdir()
    with pytest.raises(RankFailure, match="holds checkpoints of another run; pass --resume"):
        ranks2.run(prepared, tmp_path, False)
    ranks2.run(prepared, tmp_path, True)


def test_later_checkpoints_are_set_aside_and_never_lost(tmp_path, ranks2):
    for _ in range(2):
        for done in (3, 4, 5, 123456789):
            checkpoint_of(tmp_path, done).mkdir(exist_ok=True)
        (tmp_path / "step-mine").mkdir(exist_ok=True)
        ranks2.run(set_aside_after, tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
        "step-00000005.abandoned",
        "step-00000005.abandoned-2",
        "step-123456789.abandoned",
        "step-123456789.abandoned-2",
        "step-mine",
    ]
