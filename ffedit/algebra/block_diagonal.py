"""A block-diagonal matrix, stored as its blocks.

The keys of a mixture of experts are stacked, and their second moment has one block for each expert. The entries off
the blocks (two experts active at one token) are left out, so an inverse, a product and a projection are
computed expert by expert, at the size of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """Block-diagonal matrix diag(B_1, …, B_p).

    Attributes:
        blocks: of any shapes, in order.
    """

    blocks: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[Σ rows, Σ columns]."""
        return sum(len(block) for block in self.blocks), sum(block.shape[1] for block in self.blocks)

    def to(self, device: torch.device) -> Blocks:
        """Return a copy on another device."""
        return Blocks(tuple(block.to(device) for block in self.blocks))

    @property
    def T(self) -> Blocks:
        """Transpose."""
        return Blocks(tuple(block.T for block in self.blocks))

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the product with `columns` [Σ columns, n]."""
        parts = columns.split([block.shape[1] for block in self.blocks])
        return torch.cat([block @ part for block, part in zip(self.blocks, parts, strict=True)])


Moment: TypeAlias = Tensor | Blocks


def blocks_of(matrix: Moment) -> tuple[Tensor, ...]:
    """Return the blocks of a matrix; a Tensor is its own only block."""
    return matrix.blocks if isinstance(matrix, Blocks) else (matrix,)


def diagonal(blocks: Sequence[Tensor]) -> Moment:
    """Return the matrix of these blocks: a single block as it is, several as `Blocks`."""
    return blocks[0] if len(blocks) == 1 else Blocks(tuple(blocks))


def split(rows: Tensor, matrix: Moment) -> tuple[Tensor, ...]:
    """Split `rows` [n, Σ rows of the blocks] as the blocks are."""
    pieces: tuple[Tensor, ...] = rows.split([len(block) for block in blocks_of(matrix)], -1)
    return pieces
