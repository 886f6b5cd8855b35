"""The kernels: attention in tiles of rows and keys, forward and backward, in Triton.

arguments   what a kernel is compiled for and what it is given
reading     which block a program has, and what it reads of rows and keys
scores      scores of a tile and their gradients: every kind of bias is one branch in `bias_of`
forward     forward_kernel: out and log-sum-exp; a program per block of rows, or per block of rows and share of the keys
backward    drop_kernel: in half precision, what each row loses to all of its weights' gradients
            rows_kernel: the gradients of q and of what belongs to a row
            keys_kernel: those of k, v and of what belongs to a key; a program walks through all heads that share them
tables      bands_kernel: that of a table whose distances follow the slots, a program per band along the diagonal
            entries_kernel: that of any table, curve or profile, a program per chunk of blocks of rows
skipping    bounds_kernel: which blocks of keys cannot matter to a block of rows

Nothing is added atomically and every program has its own place to write, so gradients have the same bits in every run.
Inside, scores are in units of log 2. Precision does not fall with length: a level is two float32, itself and its rest,
and enters as its difference from one level of the program's own block. Offsets of sequences and heads have 64 bits,
those of rows where they need them.

Written for Triton's interpreter and its compiler alike: plain pointers, no autotuning, every product "ieee".
"""

from lengthwise.attention.triton.kernels.backward import drop_kernel, keys_kernel, rows_kernel
from lengthwise.attention.triton.kernels.forward import forward_kernel
from lengthwise.attention.triton.kernels.skipping import bounds_kernel
from lengthwise.attention.triton.kernels.tables import bands_kernel, entries_kernel

__all__ = [
    "bands_kernel",
    "bounds_kernel",
    "drop_kernel",
    "entries_kernel",
    "forward_kernel",
    "keys_kernel",
    "rows_kernel",
]
