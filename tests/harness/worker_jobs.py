"""What a worker process of ``torch.compile`` is given to do: it finds these functions by their names."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk


def tensors() -> list[torch.Tensor]:
    """The same ones in every process: a base, a view, a parameter, a sparse one."""
    base = torch.arange(24.0).view(2, 12)
    return [base, base[:, 2:6], torch.nn.Parameter(base * 2), torch.eye(3).to_sparse()]


def describe() -> bytes:
    """The records of the tensors."""
    describer = tfk.MetaTensorDescriber()
    return tfk.dumps([describer.describe_tensor(t) for t in tensors()])


def convert(data: bytes) -> bytes:
    """The records of the fake tensors that are made of records."""
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv()))
    fakes = [converter.from_desc(d) for d in tfk.loads(data)]
    describer = tfk.MetaTensorDescriber()
    return tfk.dumps([describer.describe_tensor(fake) for fake in fakes])
