"""The file in which the write budget outlives a restart: a checksum, then what the budget packed."""

from __future__ import annotations

import logging
import os
import struct
from typing import Final

import xxhash

from kv_pool.ssd.disk.directory import Directory, replace_file

log = logging.getLogger(__name__)

BUDGET_FILE: Final = "BUDGET"
BUDGET_BYTES_MAX: Final = 64 * 1024
_HEAD: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"MOONBUD1"


def load_budget(directory: Directory) -> bytes | None:
    """What was saved last; None where nothing was, or it is damaged. Raises OSError."""
    filesystem = directory.filesystem
    try:
        fd = filesystem.open(BUDGET_FILE, os.O_RDONLY, directory.fd)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(_HEAD.size + BUDGET_BYTES_MAX + 1)
        content = bytes(content[: filesystem.preadv(fd, [memoryview(content)], 0)])
    finally:
        filesystem.close(fd)
    packed = content[_HEAD.size :]
    if len(content) < _HEAD.size or _HEAD.unpack_from(content) != (_MAGIC, xxhash.xxh3_64_intdigest(packed)):
        log.warning("ssd: the saved write budget is damaged, counting starts anew")
        return None
    return packed


def save_budget(directory: Directory, packed: bytes) -> None:
    """Replace what was saved before. Raises ValueError where it is too long, OSError."""
    if len(packed) > BUDGET_BYTES_MAX:
        raise ValueError(f"a packed budget has at most {BUDGET_BYTES_MAX} bytes, got {len(packed)}")
    content = _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(packed)) + packed
    replace_file(BUDGET_FILE, content, directory.fd, directory.filesystem)
