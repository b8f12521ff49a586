"""Rows in e4m3 with one scale each, on their way from the kernel that makes them to the product that reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuantisedRows:
    """What an fp8 product reads: ``values`` (rows, width) e4m3, ``scale`` (rows,) fp32. ``dtype``: of the rows before,
    and of the product."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, num_rows: int, width: int, like: Tensor) -> "QuantisedRows":
        """Of rows on the device and of the dtype of ``like``."""
        values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=like.device)
        return cls(values, torch.empty(num_rows, dtype=torch.float32, device=like.device), like.dtype)

    @property
    def code(self) -> Tensor:
        """``values`` as bytes, as kernels write them."""
        return self.values.view(torch.uint8)
