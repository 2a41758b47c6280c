"""Cat, stack, pad and scatter of parts whose sizes come from data."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .program import checked, in_order, ints, program, rows


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def cat_of_the_parts(x, n):
    """Both parts together are as long as the whole."""
    u = checked(n, most=x.shape[0])
    joined = torch.cat([x.narrow(0, u, x.shape[0] - u), x.narrow(0, 0, u)])
    return joined + x if joined.shape[0] == x.shape[0] else joined


@program(lambda: [(rows(8), ints(3, 4)), (rows(8), ints(0, 8))], lambda: (rows(8), ints(9, 1)))
def cat_of_two(x, n):
    """The sum of two lengths is at least each."""
    u, v = n.tolist()
    for number in (u, v):
        torch._check(number >= 0)
        torch._check(number <= x.shape[0])
    joined = torch.cat([x.narrow(0, 0, u), x.narrow(0, 0, v)])
    return joined + 1 if joined.shape[0] >= u else joined - 1


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def pad_to_the_size(x, n):
    """Zeros up to the size of the whole."""
    u = checked(n, most=x.shape[0])
    missing = x.shape[0] - u
    if missing >= 0:
        return F.pad(x.narrow(0, 0, u), (0, 0, 0, missing))
    return x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def zeros_of_the_rest(x, n):
    """New rows for what is missing."""
    u = checked(n, most=x.shape[0])
    return torch.cat([x.narrow(0, 0, u), x.new_zeros(x.shape[0] - u, x.shape[1])])


@program(lambda: [(rows(8), ints(3, 4)), (rows(8), ints(8, 8))], lambda: (rows(8), ints(9, 9)))
def add_equal_parts(x, n):
    """Two parts of one length."""
    u, _ = in_order(n, x.shape[0])
    if u <= x.shape[0]:
        return x.narrow(0, 0, u) + x.narrow(0, x.shape[0] - u, u)
    return x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(-1)))
def zeros_and_ones(x, n):
    """Two new tensors of one length."""
    u = checked(n)
    return torch.zeros(u) + torch.ones(u) + x.sum()


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(9)))
def write_into_a_buffer(x, n):
    """A part is written over the first rows of a buffer."""
    u = checked(n, most=x.shape[0])
    buffer = torch.zeros_like(x)
    if u <= buffer.shape[0]:
        buffer.narrow(0, 0, u).copy_(x.narrow(0, 0, u))
    return buffer


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(-1)))
def repeat_rows(x, n):
    """A repeated row is as long as the number says."""
    u = checked(n)
    repeated = x[0].expand(u, x.shape[1])
    return repeated + 1 if repeated.shape[0] * 2 >= repeated.shape[0] else repeated


@program(
    lambda: [(rows(8), ints(3, 4, 1)), (rows(8), ints(1, 1, 1))], lambda: (rows(8), ints(9, -1, 0))
)
def cat_of_three(x, n):
    """Three lengths that add up to no more than the size."""
    a, b, c = n.tolist()
    for number in (a, b, c):
        torch._check(number >= 0)
    torch._check(a + b + c <= x.shape[0])
    parts = [x.narrow(0, 0, a), x.narrow(0, a, b), x.narrow(0, a + b, c)]
    joined = torch.cat(parts)
    return joined + 1 if joined.shape[0] <= x.shape[0] else joined - 1


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(7))], lambda: (rows(8), ints(9)))
def roll_by_a_number(x, n):
    """A rotation by parts."""
    u = checked(n)
    torch._check(u < x.shape[0])
    rest = x.shape[0] - u
    if rest >= 1:
        return torch.cat([x.narrow(0, rest, u), x.narrow(0, 0, rest)])
    return x
