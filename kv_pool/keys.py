"""Identity of a block: who may reuse which bytes.

A block is named by a chained, keyed BLAKE2b-128 digest: ``key_i = H(root, key_{i-1}, tokens_i)``. The *root* digests all
that decides whether two blocks may stand for each other (weights, layout, block size, reuse mode, tenant ...), so another
model, dtype or tenant can never produce a hit. Python's ``hash`` is never used: it differs between processes.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""16 bytes naming one full block and, through the chain, all tokens before it."""

CacheRoot = NewType("CacheRoot", bytes)
"""32 bytes: the key of the keyed hash. Different root, no hit, ever."""

KEY_BYTES = 16
ROOT_BYTES = 32
PROTOCOL = b"moonpool-kv-1"


def cache_root(parts: Iterable[tuple[str, str]], *, tenant_secret: bytes = b"", tenant: str = "", salt: str = "") -> CacheRoot:
    """Digest of everything that must agree before two requests may share a block.

    ``parts`` are ``(name, value)`` pairs (weights fingerprint, layout digest, block_tokens, reuse mode, adapter ...);
    their order does not matter. ``tenant`` is bound by an HMAC under the server's ``tenant_secret`` (at most 64 bytes),
    ``salt`` is the request's own narrowing (``cache_salt``).
    """
    digest = hashlib.blake2b(digest_size=ROOT_BYTES, person=b"moonpool-root")
    fields = [("protocol", PROTOCOL.decode()), *parts]
    domain = hashlib.blake2b(tenant.encode(), key=tenant_secret[:64], digest_size=32).hexdigest()
    for name, value in sorted([*fields, ("tenant", domain), ("salt", salt)]):
        for text in (name, value):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)))
            digest.update(encoded)
    return CacheRoot(digest.digest())


class BlockChain:
    """Incremental key chain of one sequence: append tokens, read the keys of its full blocks.

    Used by the gateway for a prompt and by the decode worker for what it generates.
    """

    __slots__ = ("_pending", "_root", "block_tokens", "keys")

    def __init__(self, root: CacheRoot, block_tokens: int, tokens: Sequence[int] = ()) -> None:
        if len(root) != ROOT_BYTES:
            raise ValueError(f"a cache root has {ROOT_BYTES} bytes, got {len(root)}")
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self._root = root
        self._pending: list[int] = []
        self.block_tokens = block_tokens
        self.keys: list[BlockKey] = []
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` (ids in 0 .. 2**32 - 1); keys of blocks that became full are appended to ``keys``."""
        self._pending.extend(tokens)
        size = self.block_tokens
        while len(self._pending) >= size:
            self.keys.append(block_key(self._root, self.keys[-1] if self.keys else None, self._pending[:size]))
            del self._pending[:size]

    @classmethod
    def resumed(cls, root: CacheRoot, block_tokens: int, keys: Sequence[BlockKey], tail: Sequence[int]) -> BlockChain:
        """A chain whose full blocks are already named ``keys``, followed by ``tail`` (fewer than ``block_tokens`` tokens)."""
        if len(tail) >= block_tokens:
            raise ValueError(f"a tail of {len(tail)} tokens is a full block of {block_tokens}")
        chain = cls(root, block_tokens)
        chain.keys.extend(keys)
        chain.extend(tail)
        return chain

    @property
    def tail_tokens(self) -> int:
        """Tokens after the last full block, 0 .. block_tokens - 1."""
        return len(self._pending)


def block_key(root: CacheRoot, parent: BlockKey | None, tokens: Sequence[int]) -> BlockKey:
    """Key of one full block: BLAKE2b-128 keyed with ``root`` over the parent's key and the tokens as little-endian u32."""
    digest = hashlib.blake2b(parent or bytes(KEY_BYTES), key=root, digest_size=KEY_BYTES, person=b"moonpool-block")
    digest.update(little_endian_u32(tokens))
    return BlockKey(digest.digest())


def chain_keys(root: CacheRoot, tokens: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """Keys of all full blocks of ``tokens``."""
    return BlockChain(root, block_tokens, tokens).keys


def private_key(root: CacheRoot, request_id: str, attempt: int) -> BlockKey:
    """Key of a request's tail: known to its two workers only, never part of a chain, never a cache hit."""
    digest = hashlib.blake2b(request_id.encode(), key=root, digest_size=KEY_BYTES, person=b"moonpool-tail")
    digest.update(struct.pack("<Q", attempt))
    return BlockKey(digest.digest())


def little_endian_u32(tokens: Sequence[int]) -> bytes:
    """``tokens`` as canonical bytes, the same on every machine."""
    packed = array("I", tokens)
    if packed.itemsize != 4:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        packed.byteswap()
    return packed.tobytes()
