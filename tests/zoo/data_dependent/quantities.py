"""Operators whose results have sizes from data: what they guarantee decides branches."""

from __future__ import annotations

import torch

from .program import checked, ints, program, rows


def _masked() -> list[tuple[torch.Tensor]]:
    return [(rows(8) % 3,), (torch.zeros(8, 4),), (torch.ones(5, 4),)]


@program(_masked)
def nonzero_is_at_most_all(x):
    """There are no more nonzeros than elements."""
    found = x.nonzero()
    return x + 1 if found.shape[0] <= x.numel() else x - 1


@program(_masked)
def nonzero_of_a_row(x):
    """There are no more nonzeros in a column than rows."""
    found = x[:, 1].nonzero()
    return x + 1 if found.shape[0] <= x.shape[0] else x - 1


@program(_masked)
def masked_select_is_at_most_all(x):
    """A mask selects no more than there is."""
    chosen = torch.masked_select(x, x > 1)
    return x + 1 if chosen.shape[0] <= x.numel() else x - 1


@program(_masked)
def index_by_a_mask(x):
    """Rows by a mask are no more than the rows."""
    chosen = x[x[:, 1] > 1]
    return x + 1 if chosen.shape[0] <= x.shape[0] else x - 1


@program(_masked)
def index_by_a_mask_then_pad(x):
    """What a mask leaves out is not negative."""
    chosen = x[x[:, 1] > 1]
    missing = x.shape[0] - chosen.shape[0]
    return torch.cat([chosen, x.new_zeros(missing, x.shape[1])]) if missing >= 0 else chosen


@program(_masked)
def unique_is_at_most_all(x):
    """There are no more distinct numbers than numbers."""
    found = torch.unique(x)
    return x + 1 if found.shape[0] <= x.numel() else x - 1


@program(_masked)
def unique_counts(x):
    """Distinct numbers and their counts are equally many."""
    found, counts = torch.unique(x, return_counts=True)
    return x + 1 if counts.shape[0] <= x.numel() and counts.shape[0] == found.shape[0] else x - 1


@program(lambda: [(rows(4), ints(1, 2, 0, 3))])
def repeat_interleave_rows(x, n):
    """A repetition by counts."""
    repeated = torch.repeat_interleave(x, n, dim=0)
    return repeated + 1 if repeated.shape[0] >= 0 else repeated


@program(lambda: [(ints(1, 2, 0, 3),), (ints(0, 0, 0),)])
def bincount_length(n):
    """Counts are at least as many as asked for."""
    counts = torch.bincount(n, minlength=8)
    return counts + 1 if counts.shape[0] >= 8 else counts


@program(lambda: [(rows(8)[:, 0], ints(5)), (rows(8)[:, 0], ints(100))])
def searchsorted_position(x, n):
    """A position is between zero and the length, so the part before it exists."""
    at = torch.searchsorted(x, n.to(x.dtype)).sum().item()
    torch._check(at >= 0)
    torch._check(at <= x.shape[0])
    return x.narrow(0, 0, at) + 1 if at <= x.shape[0] else x


@program(lambda: [(rows(8)[:, 0], ints(5)), (rows(8)[:, 0], ints(100))])
def part_before_a_position(x, n):
    """A position by bisection is at most the length, without a check."""
    at = torch.searchsorted(x, n.to(x.dtype))[0].item()
    return x.narrow(0, 0, at) + 1 if at <= x.shape[0] else x


@program(_masked)
def row_of_the_largest(x):
    """The position of the largest number is a position."""
    at = x[:, 1].argmax().item()
    return x[at] if at < x.shape[0] else x[0]


@program(_masked)
def count_of_a_mask(x):
    """No more are counted than there are, so the first rows exist, and the rest of them."""
    count = (x[:, 1] > 1).sum().item()
    return torch.cat([x[:count] + 1, x[count:]]) if count <= x.shape[0] else x


@program(lambda: [(rows(8), ints(1, 0, 1, 1)), (rows(4), ints(0, 0))])
def tokens_by_bincount(x, experts):
    """Tokens of each expert are no more than there are."""
    first, second = torch.bincount(experts, minlength=2)[:2].tolist()
    return x + 1 if max(first, second) <= experts.shape[0] else x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(-4)), (rows(8), ints(90))])
def clamped_in_a_tensor(x, n):
    """A number that is clamped to the size before it is read."""
    length = n.clamp(0, x.shape[0])[0].item()
    return x.narrow(0, 0, length) if length <= x.shape[0] else x


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def topk_of_a_number(x, n):
    """The largest few, by a number of them."""
    k = checked(n, most=x.shape[0])
    values, at = torch.topk(x[:, 0], k)
    return values + at if values.shape[0] <= x.shape[0] else values


@program(lambda: [(rows(8) % 3, ints(2)), (rows(8), ints(1))], lambda: (rows(8), ints(90)))
def topk_of_the_nonzeros(x, n):
    """The largest few of what a mask selects."""
    chosen = torch.masked_select(x, x > 0)
    k = checked(n, most=chosen.shape[0])
    values, _ = torch.topk(chosen, k)
    return values if k <= x.numel() else values * 2


@program(_masked)
def nonzero_then_first_ones(x):
    """Twice selected is at most once selected."""
    chosen = torch.masked_select(x, x > 0)
    again = torch.masked_select(chosen, chosen > 1)
    return x + 1 if again.shape[0] <= x.numel() else x - 1


@program(lambda: [(rows(8), ints(2, 6)), (rows(8), ints(1, 7))], lambda: (rows(8), ints(2, 5)))
def sizes_of_a_split_fit(x, n):
    """Sizes with which a split succeeded are no larger than the whole."""
    first, second = torch.split(x, n.tolist())
    if first.shape[0] <= x.shape[0]:
        return first.sum(0) + second.sum(0)
    return first.sum(0)


@program(lambda: [(rows(8) % 3,), (torch.ones(5, 4),)], lambda: (torch.zeros(4, 4),))
def some_nonzero_exists(x):
    """A selection that is checked not to be empty."""
    chosen = torch.masked_select(x, x > 0)
    torch._check(chosen.shape[0] >= 1)
    return chosen.max() if chosen.shape[0] > 0 else x.sum()


@program(lambda: [(rows(8) % 3,), (torch.ones(5, 4),)])
def unknown_nonzero(x):
    """Nothing gives that anything is selected."""
    chosen = x.nonzero()
    return x + 1 if chosen.shape[0] > 0 else x - 1
