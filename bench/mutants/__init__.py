"""Faults of one line are planted in the package, and tests must see them: which share do they see?

judged.json says of survivors why they are none: "equivalent: ..." (nobody can tell the difference),
"unreachable: ..." (on a machine like this), or what became of them: "test added: ...".
"""
