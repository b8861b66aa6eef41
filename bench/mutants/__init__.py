"""Faults of one line are planted in the package, and tests must see them: what share do they see?

draw      which faults: by a seed, from the syntax trees of `tpkernels/` and the text of `csrc/`
tree      a private copy of a checkout, in which a fault is planted and taken out again
server    a process that has imported torch, but nothing of ours, and forks for each run of tests
run       each fault meets the tests that it reaches (`tests.affected`), the nearest first, until one fails
report    the shares by room, as a table, and what survived

judged.json says of survivors why they are none: "equivalent: ..." (nobody can tell the difference),
"unreachable: ..." (on a machine like this), or what became of them: "test added: ...".
"""
