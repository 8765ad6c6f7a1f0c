"""The file in which the write budget outlives a restart."""

from __future__ import annotations

import logging
import os
from typing import Final

from kv_pool.ssd.disk.directory import Directory, replace_file
from kv_pool.ssd.format import decode_budget, encode_budget

log = logging.getLogger(__name__)

BUDGET_FILE: Final = "BUDGET"
BUDGET_BYTES_MAX: Final = 64 * 1024


def load_budget(directory: Directory) -> bytes | None:
    """What was saved last; None where nothing was, or it is damaged. Raises OSError."""
    filesystem = directory.filesystem
    try:
        fd = filesystem.open(BUDGET_FILE, os.O_RDONLY, directory.fd)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(BUDGET_BYTES_MAX)
        size = filesystem.preadv(fd, [memoryview(content)], 0)
    finally:
        filesystem.close(fd)
    packed = decode_budget(bytes(content[:size]))
    if packed is None:
        log.warning("ssd: the saved write budget is damaged, counting starts anew")
    return packed


def save_budget(directory: Directory, packed: bytes) -> None:
    """Replace what was saved before. Raises ValueError where it is too long, OSError."""
    content = encode_budget(packed)
    if len(content) > BUDGET_BYTES_MAX:
        raise ValueError(f"the file of the write budget has at most {BUDGET_BYTES_MAX} bytes, got {len(content)}")
    replace_file(BUDGET_FILE, content, directory.fd, directory.filesystem)
