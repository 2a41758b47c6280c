"""Candidate changes of a tensor's elements, for the search of `data_search`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SMALL = 24
"""Number of elements up to which each is changed alone; of larger tensors only a few are."""


def changed(
    t: torch.Tensor, aims: Sequence[int], steps: Sequence[int], generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield tensors of the same shape and dtype with other elements.

    Args:
        t: the current elements.
        aims: target values of an element, of the sum, or of the number of elements that satisfy
            something.
        steps: amounts by which to change elements.
        generator: chooses elements of a large tensor.
    """
    count = t.numel()
    if not count:
        return
    flat = t.reshape(-1).cpu()
    if t.dtype == torch.bool:
        flags = dict.fromkeys([0, count, *aims])
        rows = (torch.arange(count) < number for number in flags if 0 <= number <= count)
    elif t.dtype.is_floating_point:
        rows = (row.to(t.dtype) for row in _floats(flat.float(), aims, steps))
    else:
        limits = torch.iinfo(t.dtype)
        wide = _integers(flat.to(torch.int64), aims, steps)
        rows = (row.clamp(limits.min, limits.max).to(t.dtype) for row in wide)
    for row in rows:
        yield row.reshape(t.shape)
    places = range(count)
    if count > _SMALL:  # drawn only if all the others are taken
        drawn = torch.randint(0, count, (_SMALL // 2,), generator=generator)
        places = [0, count - 1, *(int(i) for i in drawn)]
    for row in _one_by_one(flat, places, aims, steps):
        yield row.reshape(t.shape)


def _integers(
    flat: torch.Tensor, aims: Sequence[int], steps: Sequence[int]
) -> Iterator[torch.Tensor]:
    count, places = flat.numel(), torch.arange(flat.numel())
    for number in aims:
        yield torch.full((count,), number)
    for step in steps:
        yield flat + step
    for number in (n for n in aims if n >= 0):
        alone = torch.where(places == 0, number, 0)
        yield alone
        yield alone.flip(0)
        if number <= count:
            yield (places < number).to(torch.int64)
        share, rest = divmod(number, count)
        yield torch.full((count,), share) + (places < rest)
        yield places.clamp(max=number)
        yield places % (number + 1)
        yield torch.linspace(0, number, count).round().to(torch.int64)


def _floats(
    flat: torch.Tensor, aims: Sequence[int], steps: Sequence[int]
) -> Iterator[torch.Tensor]:
    count, places = flat.numel(), torch.arange(flat.numel())
    size = flat.abs() + 0.5
    for number in aims:
        yield torch.full((count,), float(number))
        if 0 <= number <= count:
            yield torch.where(places < number, size, -size)
            yield torch.where(places < number, size, 0.0)
    for step in steps:
        for part in (1.0, 0.5, 0.25, 0.1, 0.01):
            yield flat + step * part
    for number in aims:
        yield torch.full((count,), number / count)
        yield torch.full((count,), number + 0.5)
        yield places.clamp(max=max(number - 1, 0))
    for factor in (-1.0, 0.5, 2.0, 10.0, 0.1):
        yield flat * factor
    yield size


def _one_by_one(
    flat: torch.Tensor, places: Sequence[int], aims: Sequence[int], steps: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Tensors in which one element is changed."""
    if flat.dtype == torch.bool:
        for at in places:
            made = flat.clone()
            made[at] = ~made[at]
            yield made
        return
    limits = None if flat.dtype.is_floating_point else torch.iinfo(flat.dtype)
    for at in places:
        now = flat[at].item()
        for number in dict.fromkeys([*aims, *(now + step for step in steps)]):
            if number == now or (limits and not limits.min <= number <= limits.max):
                continue
            made = flat.clone()
            made[at] = number
            yield made


def fill(inputs: Sequence[torch.Tensor], data: Mapping[int, torch.Tensor]) -> None:
    """Copy data into inputs, by position."""
    for at, made in data.items():
        mode = torch.inference_mode() if inputs[at].is_inference() else torch.no_grad()
        with mode:
            inputs[at].detach().copy_(made)
