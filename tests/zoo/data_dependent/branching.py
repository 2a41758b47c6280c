"""Python branches on conditions that follow from earlier checks."""

from __future__ import annotations

import torch

from .program import checked, in_order, ints, program, rows


def _two(*pairs: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(rows(8), ints(*pair)) for pair in pairs]


def _one(*numbers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(rows(8), ints(number)) for number in numbers]


@program(lambda: _two((2, 3), (0, 8), (5, 5)), lambda: (rows(8), ints(5, 4)))
def chain_of_two(x, n):
    """``u <= v <= s`` gives ``u <= s``."""
    u, v = n.tolist()
    torch._check(u <= v)
    torch._check(v <= x.shape[0])
    return x + 1 if u <= x.shape[0] else x - 1


@program(lambda: [(rows(9), ints(1, 2, 3, 4))], lambda: (rows(9), ints(1, 2, 1, 4)))
def chain_of_four(x, n):
    """A longer chain, with steps."""
    a, b, c, d = n.tolist()
    torch._check(a < b)
    torch._check(b < c)
    torch._check(c < d)
    return x + 1 if a + 3 <= d else x - 1


@program(lambda: _one(0, 8, 16), lambda: (rows(8), ints(12)))
def multiple_of_eight(x, n):
    """A multiple of 8 is a multiple of 4."""
    u = n.item()
    torch._check(u % 8 == 0)
    return x + 1 if u % 4 == 0 else x - 1


@program(lambda: _one(3, 7, 11), lambda: (rows(8), ints(4)))
def odd_remainder(x, n):
    """A remainder of 3 by 4 is odd."""
    u = n.item()
    torch._check(u % 4 == 3)
    return x + 1 if u % 2 == 1 else x - 1


@program(lambda: _one(0, 12, 24), lambda: (rows(8), ints(4)))
def common_multiple(x, n):
    """Multiples of 4 and of 6 are multiples of 12."""
    u = n.item()
    torch._check(u % 4 == 0)
    torch._check(u % 6 == 0)
    return x + 1 if u % 12 == 0 else x - 1


@program(lambda: _two((2, 3), (3, 2)))
def maximum_at_least(x, n):
    """A maximum is at least its arguments."""
    u, v = n.tolist()
    return x + 1 if max(u, v) >= u else x - 1


@program(lambda: _two((2, 3), (3, 2)))
def minimum_at_most(x, n):
    """A minimum is at most its arguments."""
    u, v = n.tolist()
    return x + 1 if min(u, v) <= v else x - 1


@program(lambda: _one(0, 2, 4), lambda: (rows(8), ints(5)))
def half_of_a_size(x, n):
    """``2 * u <= s`` and ``u >= 0`` give ``u <= s``."""
    u = checked(n)
    torch._check(2 * u <= x.shape[0])
    return x + 1 if u <= x.shape[0] else x - 1


@program(lambda: _two((2, 3), (0, 8)), lambda: (rows(8), ints(5, 4)))
def sum_fits(x, n):
    """What two numbers add up to bounds each of them."""
    u, v = n.tolist()
    torch._check(u >= 0)
    torch._check(v >= 0)
    torch._check(u + v <= x.shape[0])
    return x + 1 if v <= x.shape[0] else x - 1


@program(lambda: _two((2, 6), (3, 8)), lambda: (rows(8), ints(2, 9)))
def middle_of_two(x, n):
    """The middle of two numbers is between them."""
    low, high = in_order(n, x.shape[0])
    middle = (low + high) // 2
    if middle >= low and middle <= high:
        return x + 1
    return x - 1


@program(lambda: _one(3, 8, 9))
def halves_make_the_whole(x, n):
    """The two halves of a number add up to it."""
    u = n.item()
    half = u // 2
    return x + 1 if half + (u - half) == u else x - 1


@program(lambda: _one(3, 8, 9), lambda: (rows(8), ints(-2)))
def quotient_is_smaller(x, n):
    """A quotient is at most the number."""
    u = checked(n)
    return x + 1 if u // 3 <= u else x - 1


@program(lambda: _one(3, 8, 12), lambda: (rows(8), ints(20)))
def quotient_of_a_bound(x, n):
    """A bound of a number bounds its quotient."""
    u = checked(n)
    torch._check(u < 16)
    return x + 1 if u // 4 < 4 else x - 1


@program(lambda: _two((2, 3), (0, 4)), lambda: (rows(8), ints(2, 9)))
def product_of_bounds(x, n):
    """Bounded factors have a bounded product."""
    u, v = n.tolist()
    for number in (u, v):
        torch._check(number >= 0)
        torch._check(number <= 4)
    return x + 1 if u * v <= 16 else x - 1


@program(lambda: _two((2, 2), (5, 5)), lambda: (rows(8), ints(2, 3)))
def equal_numbers(x, n):
    """Equal numbers have equal quotients."""
    u, v = n.tolist()
    torch._check(u == v)
    return x + 1 if u // 3 == v // 3 else x - 1


@program(lambda: _two((2, 2), (5, 5)), lambda: (rows(8), ints(2, 3)))
def equal_by_two_bounds(x, n):
    """``u <= v`` and ``v <= u`` are ``u == v``."""
    u, v = n.tolist()
    torch._check(u <= v)
    torch._check(v <= u)
    return x + 1 if u == v else x - 1


@program(lambda: _two((2, 3), (5, 7)), lambda: (rows(8), ints(2, 2)))
def different_by_order(x, n):
    """``u < v`` excludes ``u == v``."""
    u, v = n.tolist()
    torch._check(u < v)
    return x - 1 if u == v else x + 1


@program(lambda: _two((9, 2), (12, 8)), lambda: (rows(8), ints(4, 2)))
def one_of_two_conditions(x, n):
    """A condition that is one of two, of which one is out."""
    u, v = n.tolist()
    torch._check(torch.sym_or(u < 3, u > 8) if hasattr(torch, "sym_or") else (u > 8) | (u < 3))
    torch._check(u > v)
    torch._check(v >= 2)
    torch._check(u > 3)
    return x + 1 if u >= 9 else x - 1


@program(lambda: _one(4, 5), lambda: (rows(8), ints(9)))
def unknown_bound(x, n):
    """Nothing gives that the number is at least 3: a check is missing."""
    u = n.item()
    torch._check(u <= x.shape[0])
    return x + 1 if u >= 3 else x - 1


@program(lambda: _one(4, 6))
def unknown_divisor(x, n):
    """Nothing gives that the number is even."""
    u = n.item()
    return x + 1 if (2 * u) % 4 == 0 else x - 1


@program(lambda: _two((4, 6), (2, 3)), lambda: (rows(8), ints(4, 3)))
def unknown_sum(x, n):
    """Nothing gives that both numbers together fit."""
    u, v = n.tolist()
    torch._check(u <= v)
    return x + 1 if 2 * u + 2 * v <= 4 * x.shape[0] else x - 1
