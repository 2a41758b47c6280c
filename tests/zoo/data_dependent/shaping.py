"""View, reshape, expand and matrix products with sizes from data."""

from __future__ import annotations

import torch

from .program import checked, ints, program, rows


@program(lambda: [(rows(8), ints(4)), (rows(8), ints(8))], lambda: (rows(8), ints(6)))
def view_in_fours(x, n):
    """A view with -1 of a part whose length is a multiple."""
    u = checked(n, most=x.shape[0])
    torch._check(u % 4 == 0)
    return x.narrow(0, 0, u).view(-1, 4, x.shape[1]) + 1


@program(lambda: [(rows(16), ints(8)), (rows(16), ints(16))], lambda: (rows(16), ints(12)))
def view_in_twos_of_eights(x, n):
    """A multiple of 8 in pairs."""
    u = checked(n, most=x.shape[0])
    torch._check(u % 8 == 0)
    part = x.narrow(0, 0, u)
    return part.view(u // 2, 2, x.shape[1]).sum(1) if u % 2 == 0 else part


@program(lambda: [(rows(8), ints(2, 3)), (rows(8), ints(2, 4))], lambda: (rows(8), ints(3, 3)))
def view_by_two_numbers(x, n):
    """Two sizes whose product is the number of rows used."""
    u, v = n.tolist()
    torch._check(u >= 0)
    torch._check(v >= 0)
    torch._check(u * v <= x.shape[0])
    return x.narrow(0, 0, u * v).view(u, v, x.shape[1]) + 1


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(9)))
def flatten_a_part(x, n):
    """A part as a vector."""
    u = checked(n, most=x.shape[0])
    flat = x.narrow(0, 0, u).reshape(-1)
    return flat + 1 if flat.shape[0] == u * x.shape[1] else flat


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(6))], lambda: (rows(8), ints(9)))
def product_with_its_transpose(x, n):
    """A matrix product of a part with its transpose."""
    u = checked(n, most=x.shape[0])
    part = x.narrow(0, 0, u)
    return part @ part.t()


@program(lambda: [(rows(8), ints(3, 4)), (rows(8), ints(6, 1))], lambda: (rows(8), ints(9, 1)))
def outer_sum(x, n):
    """A column and a row of two lengths."""
    u, v = n.tolist()
    for number in (u, v):
        torch._check(number >= 1)
        torch._check(number <= x.shape[0])
    grid = x[:, 0].narrow(0, 0, u)[:, None] + x[:, 1].narrow(0, 0, v)[None, :]
    return grid * 2 if grid.shape[0] * grid.shape[1] >= grid.shape[1] else grid


@program(lambda: [(rows(8), ints(3)), (rows(8), ints(8))], lambda: (rows(8), ints(9)))
def mask_of_a_length(x, n):
    """A mask over positions before a number."""
    u = checked(n, most=x.shape[0])
    positions = torch.arange(x.shape[0])
    return x * (positions < u)[:, None]


@program(lambda: [(rows(8), ints(4)), (rows(8), ints(8))], lambda: (rows(8), ints(7)))
def halves_of_an_even_part(x, n):
    """The halves of an even number of rows are equally long."""
    u = checked(n, most=x.shape[0])
    torch._check(u % 2 == 0)
    half = u // 2
    if half == u - half:
        return x.narrow(0, 0, half) + x.narrow(0, half, half)
    return x


@program(lambda: [(rows(8), ints(4)), (rows(8), ints(8))], lambda: (rows(8), ints(7)))
def unfold_in_windows(x, n):
    """The number of windows is at least one."""
    u = checked(n, least=4, most=x.shape[0])
    torch._check(u % 4 == 0)
    windows = (u - 4) // 4 + 1
    if windows >= 1 and windows * 4 <= x.shape[0]:
        return x.narrow(0, 0, windows * 4).sum(0)
    return x.sum(0)


@program(lambda: [(rows(8), ints(5)), (rows(8), ints(7))], lambda: (rows(8), ints(9)))
def drop_the_rest_of_a_division(x, n):
    """The part that a number of groups covers."""
    u = checked(n, most=x.shape[0])
    used = (u // 3) * 3
    if used <= x.shape[0]:
        return x.narrow(0, 0, used).view(-1, 3, x.shape[1]).sum(1)
    return x


@program(lambda: [(rows(8), ints(5)), (rows(8), ints(7))], lambda: (rows(8), ints(9)))
def rest_of_a_division(x, n):
    """A remainder is smaller than the divisor."""
    u = checked(n, most=x.shape[0])
    rest = u % 3
    if rest <= 2 and rest <= x.shape[0] + 2:
        return x + rest
    return x


@program(lambda: [(rows(8), ints(2, 4)), (rows(8), ints(3, 2))], lambda: (rows(8), ints(9, 2)))
def heads_and_width(x, n):
    """Heads times width is the number of columns used."""
    heads, width = n.tolist()
    torch._check(heads >= 1)
    torch._check(width >= 1)
    torch._check(heads * width <= x.shape[0])
    if width <= x.shape[0]:
        return x.narrow(0, 0, heads * width).view(heads, width, x.shape[1]).sum(1)
    return x


@program(lambda: [(rows(8), ints(5)), (rows(8), ints(6))])
def unknown_view(x, n):
    """A branch on divisibility of which nothing is known."""
    u = n.item()
    torch._check(u >= 0)
    if u % 4 == 0:
        return x + 1
    return x
