"""What the tuner has to say: warnings, once a machine; with TPKERNELS_LOG=choices each choice and its reason.

Without the variable the standard way serves: `logging.getLogger("tpkernels.choices").setLevel("INFO")`.
"""

from __future__ import annotations

import logging
import os

from tpkernels.errors import logger_of_machine

choices = logging.getLogger("tpkernels.choices")
warnings = logger_of_machine("tpkernels.dispatch")


def show_choices_if_asked() -> None:
    """Give the choices a stream of their own, once, if the environment asks for them."""
    words = os.environ.get("TPKERNELS_LOG", "")
    if words not in ("", "choices"):
        warnings.warning("TPKERNELS_LOG is %r; expected choices", words)
    if words != "choices" or choices.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("tpkernels[%(process)d] %(message)s"))
    choices.addHandler(handler)
    choices.setLevel(logging.INFO)
    choices.propagate = False  # or an application that logs would show each line twice
