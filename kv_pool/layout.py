"""Shape of one block's bytes, the same in a DRAM slot, an SSD record and a network frame.

A block is one contiguous run: for each layer in order, K ``[block_tokens, kv_heads, k_dim]`` then V ``[block_tokens, kv_heads,
v_dim]``. Where all layers agree and ``k_dim == v_dim`` that is exactly ``[layers, 2, block_tokens, kv_heads, head_dim]``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one attention layer: ``kv_heads`` heads of ``k_dim`` and ``v_dim`` numbers (they differ for MLA)."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What a block's bytes mean. Two ends with different layouts never exchange blocks; nothing is converted on the way."""

    layers: tuple[LayerShape, ...]
    block_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a block layout needs at least one layer")
        if self.block_tokens <= 0 or self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens must be a power of two, got {self.block_tokens}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def uniform(self) -> bool:
        """True where one tensor ``[layers, 2, block_tokens, kv_heads, head_dim]`` holds the block."""
        first = self.layers[0]
        return first.k_dim == first.v_dim and all(layer == first for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return sum(s.kv_heads * (s.k_dim + s.v_dim) for s in self.layers) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def digest(self) -> str:
        """Hex digest for a cache root: any change of shape, size or dtype changes it."""
        return hashlib.blake2b(repr(self.to_wire()).encode(), digest_size=16).hexdigest()

    def to_wire(self) -> dict[str, Any]:
        return {
            "layers": [[s.kv_heads, s.k_dim, s.v_dim] for s in self.layers],
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> BlockLayout:
        return cls(
            layers=tuple(LayerShape(*map(int, layer)) for layer in data["layers"]),
            block_tokens=int(data["block_tokens"]),
            dtype=str(data["dtype"]),
        )
