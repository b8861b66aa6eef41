"""Streams, processors and flags of the GPUs of several ranks, as a machine that runs on a CPU.

The host code of every rank runs once, on tensors that stand for those of a GPU; what it enqueues is a
`Program`. That is then executed in many orders, each from a seed: see `search`.

    program = record(4, body)          body(group) of each rank returns its results
    report = search(program, 200)      raises what an order shows: a race, a deadlock, other numbers
"""
