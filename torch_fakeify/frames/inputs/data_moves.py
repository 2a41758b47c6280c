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
        rows = _flags(flat, aims)
    elif t.dtype.is_floating_point:
        rows = _floats(flat, aims, steps)
    else:
        rows = _integers(flat, aims, steps)
    for row in rows:
        yield row.reshape(t.shape)
    places = range(count)
    if count > _SMALL:
        drawn = torch.randint(0, count, (_SMALL // 2,), generator=generator)
        places = [0, count - 1, *(int(i) for i in drawn)]
    for row in _one_by_one(flat, places, aims, steps):
        yield row.reshape(t.shape)


def _flags(flat: torch.Tensor, aims: Sequence[int]) -> Iterator[torch.Tensor]:
    """Boolean tensors with several numbers of true elements."""
    count = flat.numel()
    for number in dict.fromkeys([0, count, *aims]):
        if 0 <= number <= count:
            yield torch.arange(count) < number


def _integers(
    flat: torch.Tensor, aims: Sequence[int], steps: Sequence[int]
) -> Iterator[torch.Tensor]:
    count = flat.numel()
    limits = torch.iinfo(flat.dtype)

    def fitting(made: torch.Tensor) -> torch.Tensor:
        return made.clamp(limits.min, limits.max).to(flat.dtype)

    wide = flat.to(torch.int64)
    for number in aims:
        yield fitting(torch.full((count,), number))
    for step in steps:
        yield fitting(wide + step)
    for number in aims:
        if number < 0:
            continue
        alone = torch.zeros(count, dtype=torch.int64)
        alone[0] = number
        yield fitting(alone)
        yield fitting(alone.flip(0))
        if number <= count:
            yield fitting((torch.arange(count) < number).to(torch.int64))
        share, rest = divmod(number, count)
        yield fitting(torch.full((count,), share) + (torch.arange(count) < rest))
        yield fitting(torch.arange(count).clamp(max=number))
        yield fitting(torch.arange(count) % (number + 1))
        yield fitting(torch.linspace(0, number, count).round().to(torch.int64))


def _floats(
    flat: torch.Tensor, aims: Sequence[int], steps: Sequence[int]
) -> Iterator[torch.Tensor]:
    count = flat.numel()
    size = flat.float().abs() + 0.5
    for number in aims:
        yield torch.full((count,), float(number)).to(flat.dtype)
        if 0 <= number <= count:
            yield torch.where(torch.arange(count) < number, size, -size).to(flat.dtype)
            yield torch.where(torch.arange(count) < number, size, 0.0).to(flat.dtype)
    for step in steps:
        for part in (1.0, 0.5, 0.25, 0.1, 0.01):
            yield (flat.float() + step * part).to(flat.dtype)
    for number in aims:
        yield torch.full((count,), number / count).to(flat.dtype)
        yield torch.full((count,), number + 0.5).to(flat.dtype)
        yield torch.arange(count).clamp(max=max(number - 1, 0)).to(flat.dtype)
    for factor in (-1.0, 0.5, 2.0, 10.0, 0.1):
        yield (flat.float() * factor).to(flat.dtype)
    yield size.to(flat.dtype)


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
