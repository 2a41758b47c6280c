"""Counts of tokens, offsets of jagged batches, pages of caches, beams and bags."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .program import checked, in_order, ints, program, rows


@program(lambda: [(rows(8), ints(3, 5)), (rows(8), ints(8, 0))], lambda: (rows(8), ints(4, 5)))
def tokens_of_two_experts(x, counts):
    """Tokens by expert, whose counts add up."""
    a, b = counts.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b == x.shape[0])
    first = x.narrow(0, 0, a) * 2
    second = x.narrow(0, a, b) * 3
    joined = torch.cat([first, second])
    return joined + x if joined.shape[0] == x.shape[0] else joined


@program(
    lambda: [(rows(8), ints(3, 1, 4)), (rows(8), ints(8, 0, 0))], lambda: (rows(8), ints(4, 4, 4))
)
def tokens_of_three_experts(x, counts):
    """Three parts of the tokens."""
    parts = torch.split(x, counts.tolist())
    joined = torch.cat([part * (at + 1) for at, part in enumerate(parts)])
    return joined + x if joined.shape[0] == x.shape[0] else joined


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(20))], lambda: (rows(8), ints(-1)))
def capacity_of_an_expert(x, n):
    """A capacity bounds the tokens that are taken."""
    count = checked(n)
    taken = min(count, 4)
    return x.narrow(0, 0, taken) + 1 if taken <= 4 else x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(9))], lambda: (rows(8), ints(-1)))
def capacity_rounded_up(x, n):
    """A capacity that is rounded up to a multiple is at least the count, and less than one more."""
    count = checked(n)
    capacity = (count + 7) // 8 * 8
    if capacity >= count and capacity < count + 8 and capacity % 4 == 0:
        return x + 1
    return x - 1


@program(
    lambda: [(rows(8), ints(0, 3, 8)), (rows(8), ints(0, 0, 8))], lambda: (rows(8), ints(0, 9, 8))
)
def offsets_of_two_rows(x, offsets):
    """Offsets in order give lengths that are not negative."""
    a, b, c = in_order(offsets, x.shape[0])
    if b - a >= 0 and c - b >= 0 and b <= x.shape[0]:
        return x.narrow(0, a, b - a).sum(0) + x.narrow(0, b, c - b).sum(0) * 2
    return x.sum(0)


@program(lambda: [(rows(8), ints(2, 5)), (rows(8), ints(0, 8))], lambda: (rows(8), ints(5, 2)))
def row_of_a_jagged_batch(x, bounds):
    """One row of a jagged batch, padded to the longest."""
    start, end = in_order(bounds, x.shape[0])
    length = end - start
    if length <= x.shape[0]:
        part = x.narrow(0, start, length)
        return F.pad(part, (0, 0, 0, x.shape[0] - length))
    return x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def causal_window(x, n):
    """A window of the last positions."""
    length = checked(n, least=1, most=x.shape[0])
    start = max(length - 4, 0)
    if start <= length and length - start <= 4:
        return x.narrow(0, start, length - start).sum(0)
    return x.sum(0)


@program(lambda: [(rows(16), ints(5)), (rows(16), ints(16))], lambda: (rows(16), ints(17)))
def pages_of_a_cache(x, n):
    """The pages of a length cover it, and fit a cache of whole pages."""
    length = checked(n, most=16)
    pages = (length + 3) // 4
    if pages <= 4 and pages * 4 >= length:
        return x.narrow(0, 0, pages * 4).view(-1, 4, x.shape[1]).sum(1)
    return x


@program(lambda: [(rows(16), ints(5)), (rows(16), ints(15))], lambda: (rows(16), ints(16)))
def slot_of_a_page(x, n):
    """Page and slot of a position are in the cache."""
    position = checked(n)
    torch._check(position < 16)
    page, slot = position // 4, position % 4
    if page < 4 and slot < 4 and page * 4 + slot == position:
        return x.view(4, 4, x.shape[1]).select(0, page).select(0, slot) + 1
    return x[0]


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(7))], lambda: (rows(8), ints(8)))
def append_to_a_cache(x, n):
    """There is room for one more."""
    used = checked(n)
    torch._check(used < x.shape[0])
    after = used + 1
    if after <= x.shape[0]:
        return x.narrow(0, 0, after) * 2
    return x


@program(lambda: [(rows(8), ints(2)), (rows(8), ints(4))], lambda: (rows(8), ints(5)))
def beams(x, n):
    """Twice as many candidates as beams."""
    beams = checked(n, least=1, most=4)
    if 2 * beams <= 8:
        values, _ = torch.topk(x.reshape(-1), 2 * beams)
        return values.narrow(0, 0, beams)
    return x.reshape(-1)


@program(lambda: [(rows(8), ints(2, 3)), (rows(8), ints(4, 2))], lambda: (rows(8), ints(5, 2)))
def beams_of_a_batch(x, n):
    """Batch times beams rows."""
    batch, beams = n.tolist()
    torch._check(batch >= 1)
    torch._check(beams >= 1)
    torch._check(batch * beams <= x.shape[0])
    if batch <= x.shape[0]:
        return x.narrow(0, 0, batch * beams).view(batch, beams, x.shape[1]).amax(1)
    return x


@program(lambda: [(rows(8), ints(0, 3), ints(1, 2, 5, 7, 0)), (rows(8), ints(0, 0), ints(1))])
def embedding_bag(x, offsets, indices):
    """Bags of rows by offsets."""
    return F.embedding_bag(indices, x, offsets, mode="sum")


@program(
    lambda: [(rows(8), ints(0, 2), ints(1, 2, 5)), (rows(8), ints(1, 3), ints(7, 0, 1))],
    lambda: (rows(8), ints(2, 1), ints(1, 2, 5)),
)
def one_bag(x, bounds, indices):
    """One bag of rows."""
    start, end = in_order(bounds, indices.shape[0])
    if end - start <= indices.shape[0]:
        return x[indices.narrow(0, start, end - start)].sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(3, 2)), (rows(8), ints(8, 1))], lambda: (rows(8), ints(9, 1)))
def draft_and_accepted(x, n):
    """Accepted tokens are at most the drafted ones."""
    drafted, accepted = n.tolist()
    torch._check(accepted >= 0)
    torch._check(accepted <= drafted)
    torch._check(drafted <= x.shape[0])
    rejected = drafted - accepted
    if rejected >= 0 and rejected <= x.shape[0]:
        return x.narrow(0, 0, accepted).sum(0) - x.narrow(0, accepted, rejected).sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(7)))
def groups_of_three(x, n):
    """Whole groups of a number of rows."""
    u = checked(n, most=x.shape[0])
    torch._check(u % 3 == 0)
    if 3 * (u // 3) == u and u // 3 <= x.shape[0]:
        return x.narrow(0, 0, u).view(u // 3, 3, x.shape[1]).amax(1)
    return x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(-1)))
def blocks_of_sixteen(x, n):
    """A grid of blocks covers a number of rows."""
    u = checked(n)
    blocks = (u + 15) // 16
    if blocks * 16 >= u and (blocks - 1) * 16 <= u:
        return x + blocks
    return x


@program(lambda: [(rows(8), ints(3, 4)), (rows(8), ints(1, 8))])
def unknown_lengths(x, n):
    """Nothing gives that the lengths add up to the size."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    return x + 1 if a + b <= x.shape[0] else x - 1


@program(lambda: [(rows(8), ints(3, 4)), (rows(8), ints(1, 8))], lambda: (rows(8), ints(-1, 8)))
def unknown_order(x, n):
    """One half of the order of two offsets is missing."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b <= x.shape[0])
    return x.narrow(0, 0, a) if a <= x.shape[0] else x
