"""What a refusal must say, beside the call that is refused."""

from tests.checks import error_of
from tests.on_ranks import equal_on_all


def refused(kind, part, call, *args, **options):
    """All of what the error says, for ranks to be compared; it must be of this kind, and say this part."""
    error, text = error_of(call, *args, **options)
    assert (error, part in text) == (kind, True), f"expected {kind}: {part}\ngot {error}: {text}"
    return text


def refused_alike(kind, part, call, *args, **options):
    """The same on all ranks, which all call it."""
    return equal_on_all(refused(kind, part, call, *args, **options))
