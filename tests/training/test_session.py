"""What a rank says: characters that would steer a terminal are shown, not obeyed."""

from types import SimpleNamespace

import pytest
import torch

from tpkernels.training.session import Session, escape_controls

HOSTILE = "\x1b[31mred\r\x9b2J\u202eback\u2028\0"
HARMLESS = r"\x1b[31mred\r\x9b2J\u202eback\u2028\x00"


class Model:
    """Writes after any prompt what a terminal would obey."""

    def eval(self):
        return self

    def generate(self, ids, count, **_):
        return torch.cat([ids, torch.tensor([list(HOSTILE.encode() + b"\n\ttab \xff")])], 1)


def test_what_a_model_writes_cannot_steer_the_terminal():
    trainer, config = SimpleNamespace(model=Model()), SimpleNamespace(seed=1)
    rank = SimpleNamespace(trainer=trainer, config=config, device=torch.device("cpu"))
    assert Session.sample(rank, "Alice ", 3) == f"Alice {HARMLESS}\n\ttab \ufffd"


def test_names_of_files_cannot_either(capsys):
    Session.say(SimpleNamespace(rank=0), f"from {HOSTILE}")
    assert capsys.readouterr().out == f"from {HARMLESS}\n"


@pytest.mark.parametrize("text", ["", "é ü 漢字 🙂 \ufffd", "a\nb\tc", r"\x1b"])
def test_other_text_stays_as_it_is(text):
    assert escape_controls(text) == text
