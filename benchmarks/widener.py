# SPDX-License-Identifier: Apache-2.0
"""Wide weights that do what narrow ones do: see benchmarks/inflate.py."""

from __future__ import annotations

import torch
from torch import Tensor

CONSTANT = 2.0**-12  # the constant dimension
FLOOR = 40.0  # an added token's logit is at most -FLOOR
MAX_RMS = 100.0  # while the rms of the stream is at most this


class Widener:
    """Makes wide weights from narrow ones, and random ones that change nothing.

    Matrices are [out, in] as in checkpoints. Results are `dtype`, on `device`.
    """

    def __init__(
        self,
        narrow: int,
        wide: int,
        constant: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
    ) -> None:
        """`constant` reserves the last dimension. Raises ValueError if `wide` is too small."""
        copies = (wide - 1 if constant else wide) // narrow
        if copies < 1:
            raise ValueError(f"hidden size {wide} is too small for {narrow}")
        self.copies = copies = copies - copies % 2 if copies > 1 else 1
        self.carriers = 1 << (copies.bit_length() - 1)
        self.narrow, self.wide, self.constant = narrow, wide, constant
        self.dtype, self.device = dtype, torch.device(device)
        self.rho = copies * narrow / wide
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # [copies, narrow]: where copy i of dimension j stands. Copies 2p and 2p + 1 are neighbours.
        copy, dim = torch.arange(copies)[:, None], torch.arange(narrow)[None]
        pair = min(2, copies)
        index = copy // pair * pair * narrow + dim * pair + copy % pair
        self.index = index.to(self.device)

    def random(self, rows: int, columns: int, std: float) -> Tensor:
        """Normal numbers [rows, columns]."""
        out = torch.randn(rows, columns, generator=self.generator, device=self.device)
        return out.mul_(std).to(self.dtype)

    def twins(self, rows: int, columns: int, std: float) -> Tensor:
        """[rows, columns], columns 2i and 2i + 1 opposite; an odd last one is zero."""
        half = self.random(rows, columns // 2, std)
        out = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        out[:, 0 : columns - 1 : 2] = half
        out[:, 1::2] = -half
        return out

    def doubled(self, rows: int) -> Tensor:
        """Random rows [rows, wide] that read the stream, 2i and 2i + 1 equal."""
        half = self.random((rows + 1) // 2, self.wide, self.wide**-0.5)
        return half.repeat_interleave(2, 0)[:rows]

    def reads(self, weight: Tensor) -> Tensor:
        """What reads the stream: [out, narrow] -> [out, wide], zero for the constant dimension."""
        out = self.reads_nothing(weight.shape[0])
        part = (weight.to(self.device, torch.float32) / self.carriers).to(self.dtype)
        for copy in range(self.carriers):
            out[:, self.index[copy]] = part
        return out

    def reads_nothing(self, rows: int) -> Tensor:
        """[rows, wide] that gives zero; random but for the constant dimension."""
        std, end = self.wide**-0.5, self.copies * self.narrow
        out = self.random(rows, self.wide, std)
        out[:, :end] = self.twins(rows, end, std) if self.copies > 1 else 0
        if self.constant:
            out[:, -1] = 0
        return out

    def writes(self, weight: Tensor) -> Tensor:
        """What writes to the stream: [narrow, in] -> [wide, in]."""
        out = torch.zeros(self.wide, weight.shape[1], dtype=self.dtype, device=self.device)
        for copy in range(self.copies):
            out[self.index[copy]] = weight.to(self.device, self.dtype)
        return out

    def writes_nothing(self, columns: int) -> Tensor:
        """[wide, columns] over inputs that come as twins."""
        out = self.twins(self.wide, columns, columns**-0.5)
        if self.constant:
            out[-1] = 0
        return out

    def norm(self, weight: Tensor | None, final: bool = False, offset: float = 0) -> Tensor:
        """RMSNorm weights [narrow] -> [wide]; None: those of an added layer.

        `offset` is 1 where a checkpoint holds them less one, else 0.
        """
        out = torch.full((self.wide,), 1 - offset, dtype=self.dtype, device=self.device)
        if weight is not None:
            exact = (weight.to(self.device, torch.float64) + offset) * self.rho**0.5
            out[self.index.flatten()] = (exact - offset).to(self.dtype).repeat(self.copies)
            rest = exact * self.carriers
            for copy in range(self.carriers):  # each rounds what the ones before left
                rounded = (rest / (self.carriers - copy) - offset).to(self.dtype)
                out[self.index[copy]] = rounded
                rest -= rounded.to(torch.float64) + offset
        if self.constant:
            out[-1] = (1 / CONSTANT if final else 0.0) - offset
        return out

    def token_logit(self) -> float:
        """Weight of the constant dimension that keeps an added token's logit below -FLOOR."""
        return -FLOOR * MAX_RMS * self.rho**0.5
