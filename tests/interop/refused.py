"""What a refusal must say, beside the call that is refused."""

from tests.checks import error_of


def refused(kind, part, call, *args, **options):
    """All of what the error says, for ranks to be compared; it must be of this kind, and say this part."""
    error, text = error_of(call, *args, **options)
    assert (error, part in text) == (kind, True), f"expected {kind}: {part}\ngot {error}: {text}"
    return text
