"""Narrow, slice, select and split by numbers from data."""

from __future__ import annotations

import torch

from .program import checked, in_order, ints, program, rows


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def narrow_first(x, n):
    """The first rows."""
    return x.narrow(0, 0, n.item()) + 1


@program(lambda: [(rows(8), ints(2, 3)), (rows(8), ints(0, 8))], lambda: (rows(8), ints(6, 3)))
def narrow_inside(x, n):
    """A window of rows."""
    start, length = n.tolist()
    torch._check(start >= 0)
    torch._check(length >= 0)
    torch._check(start + length <= x.shape[0])
    return x.narrow(0, start, length) * 2


@program(lambda: [(rows(8), ints(2, 3)), (rows(8), ints(1, 8))], lambda: (rows(8), ints(6, 3)))
def slice_between(x, n):
    """Rows between two numbers."""
    start, end = in_order(n, x.shape[0])
    part = x[start:end]
    torch._check(part.shape[0] == end - start)
    return part + 1


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def slice_the_rest(x, n):
    """All rows from a number on."""
    start = checked(n, most=x.shape[0])
    return x[start:] + 1


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(5))], lambda: (rows(8), ints(9)))
def length_of_a_slice(x, n):
    """The length of a slice is the number that bounds it."""
    u = checked(n, most=x.shape[0])
    part = x.narrow(0, 0, u)
    return part + 1 if part.shape[0] <= x.shape[0] else part - 1


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(7))], lambda: (rows(8), ints(8)))
def select_row(x, n):
    """One row by its number."""
    at = checked(n)
    torch._check(at < x.shape[0])
    return x[at] + 1


@program(lambda: [(rows(8), ints(1, 2)), (rows(8), ints(7, 7))], lambda: (rows(8), ints(2, 1)))
def select_below_another(x, n):
    """A row before another row."""
    u, v = n.tolist()
    torch._check(u >= 0)
    torch._check(u <= v)
    torch._check(v < x.shape[0])
    if u < x.shape[0]:
        return x.select(0, u) + x.select(0, v)
    return x.sum(0)


@program(
    lambda: [(rows(8), ints(2, 2, 4)), (rows(8), ints(1, 7, 0))], lambda: (rows(8), ints(2, 2, 5))
)
def split_by_tolist(x, n):
    """Parts with sizes from a tensor."""
    a, b, c = torch.split(x, n.tolist())
    return a.sum(0) + b.sum(0) * 2 + c.sum(0) * 3


@program(lambda: [(rows(8), ints(2, 6)), (rows(8), ints(1, 7))], lambda: (rows(8), ints(2, 5)))
def split_in_two(x, n):
    """Two parts with sizes that add up."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b == x.shape[0])
    first, second = torch.split(x, [a, b])
    if first.shape[0] <= x.shape[0]:
        return first.sum(0) - second.sum(0)
    return first.sum(0)


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(0))], lambda: (rows(8), ints(9)))
def split_in_head_and_tail(x, n):
    """A head and the rest; both lengths are at least zero."""
    u = checked(n, most=x.shape[0])
    tail = x.shape[0] - u
    if tail >= 0:
        return x.narrow(0, u, tail).sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(4)), (rows(8), ints(8))], lambda: (rows(8), ints(6)))
def chunk_of_a_part(x, n):
    """Chunks of a part with a known divisor."""
    u = checked(n, most=x.shape[0])
    torch._check(u % 4 == 0)
    quarter = u // 4
    if quarter * 4 == u:
        return x.narrow(0, 0, quarter).sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(1, 2)), (rows(8), ints(3, 3))], lambda: (rows(8), ints(7, 3)))
def two_windows(x, n):
    """Two windows one after the other."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b <= x.shape[0])
    if a <= x.shape[0]:
        return x.narrow(0, 0, a).sum(0) + x.narrow(0, a, b).sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(1)), (rows(8), ints(4))], lambda: (rows(8), ints(5)))
def window_of_twice(x, n):
    """A window of twice the length."""
    u = checked(n)
    torch._check(2 * u <= x.shape[0])
    if u <= x.shape[0]:
        return x.narrow(0, 0, u) + x.narrow(0, u, u)
    return x


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def step_back(x, n):
    """The last rows, by a number of them."""
    u = checked(n, least=1, most=x.shape[0])
    start = x.shape[0] - u
    if start < x.shape[0]:
        return x.narrow(0, start, u) + 1
    return x


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(12))])
def clamped_length(x, n):
    """A length that is clamped to the size."""
    u = checked(n)
    length = min(u, x.shape[0])
    if length <= x.shape[0]:
        return x.narrow(0, 0, length) + 1
    return x


@program(lambda: [(rows(8), ints(5)), (rows(8), ints(3))])
def unknown_narrow(x, n):
    """A branch on whether a window fits, of which nothing is known."""
    u = n.item()
    if u + 2 <= x.shape[0]:
        return x.narrow(0, 2, u)
    return x
