"""Sequences that several processes share: ring attention with every kind of described bias.

    part = spread(lw.layout(131_072), group)            the layout of this process's tokens
    x = take(tokens, part)                              its part of what every process has
    bias = encoding.bias(x, part)                       hooks as always, of these tokens alone
    out = lw.attend(q, k, v, layout=part, bias=bias)    these queries with the keys of all processes

A described bias has tensors of queries, tensors of keys, and shared ones such as a table. So those of the keys travel
with the keys, and the bias of any two chunks is put together where it is needed, with its true positions.

    sharding.py      which tokens a process has: two chunks, one from the start and one from the end
    sequence.py      what depends on tokens of other processes: sums over all tokens, tokens before, visible slots
    collectives.py   what processes exchange, in an order that does not depend on time
    call.py          one call of attention cut into blocks of scores
    skipping.py      blocks whose weights are all 0, which are neither sent nor computed
    ring.py          forward and backward
    layout.py        a layout of this process's tokens, and what is cut and put together by it
    model.py         the loss of a model whose sequences are shared, and the processes that torchrun starts
"""

from lengthwise.distributed.layout import gather, spread, take
from lengthwise.distributed.model import joined, ring_loss
from lengthwise.distributed.ring import ring_attend

__all__ = ["gather", "joined", "ring_attend", "ring_loss", "spread", "take"]
