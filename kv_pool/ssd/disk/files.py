"""Segment files: whole pages in and out, past the page cache where the filesystem allows it.

O_DIRECT needs buffers, offsets and lengths in whole pages. Slots of the arena are that already, so payloads move without a copy;
headers are made in buffers of their own (:class:`ScratchPool`). A filesystem that refuses O_DIRECT (tmpfs of older kernels, some
network filesystems) is used through the page cache; ``fdatasync`` makes both the same for whoever waits for an answer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kv_pool.ssd.disk.directory import FORMAT_FILE, TEMPORARY, Directory, segment_name
from kv_pool.ssd.disk.filesystem import Buffer, FileSystem
from kv_pool.ssd.records import PAGE

OPEN_FILES_MAX: Final = 256
"""Segments that stay open while nobody uses them."""
SCRATCH_PAGES: Final = 256
PROBE_FILE: Final = "PROBE" + TEMPORARY
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class ShortTransferError(OSError):
    """The kernel moved fewer bytes than asked for: the file ends too early, or the disk took no more."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "short transfer")


class FileRemovedError(OSError):
    """The file was deleted under our hands: what is written into it now is lost with the next close."""

    def __init__(self) -> None:
        super().__init__(errno.ENOENT, "the segment file was removed")


class ScratchPool:
    """Page-aligned buffers of ``SCRATCH_PAGES`` pages, kept for the next user. As many as there are users at a time."""

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = mmap.mmap(-1, SCRATCH_PAGES * PAGE)
        yield memoryview(memory)
        self._idle.append(memory)  # not where it failed: a view of it may still be held by the error


class SegmentFile:
    """One open segment. Its calls may run in several threads at a time."""

    def __init__(self, fd: int, segment_bytes: int, filesystem: FileSystem, beat: Callable[[], None]) -> None:
        self.fd = fd
        self.users = 0
        self._segment_bytes = segment_bytes
        self._filesystem = filesystem
        self._beat = beat
        self._allocated = False

    def check_linked(self) -> None:
        """Raises FileRemovedError where the file has no name any more."""
        if self._filesystem.fstat(self.fd).st_nlink == 0:
            raise FileRemovedError

    def pages(self) -> int:
        """Whole pages that the file has now, at most a segment's."""
        return min(self._filesystem.fstat(self.fd).st_size, self._segment_bytes) // PAGE

    def read(self, buffers: Sequence[memoryview], page: int) -> None:
        """Fill ``buffers`` (whole pages each, aligned) from ``page`` on. Raises ShortTransferError, OSError."""
        self._move(self._filesystem.preadv, buffers, page)

    def write(self, buffers: Sequence[memoryview], page: int) -> None:
        """Raises ShortTransferError, OSError; how much was written then is unknown."""
        self._move(self._filesystem.pwritev, buffers, page)

    def sync(self) -> None:
        self._beat()
        self._filesystem.fdatasync(self.fd)

    def allocate(self) -> None:
        """See that every page has its place on the disk, before anything is promised. Raises OSError (ENOSPC)."""
        if self._allocated:
            return
        found = self._filesystem.fstat(self.fd)
        if found.st_size < self._segment_bytes or found.st_blocks * 512 < self._segment_bytes:
            self._beat()
            self._filesystem.fallocate(self.fd, 0, self._segment_bytes)
        self._allocated = True

    def next_data(self, page: int) -> int | None:
        """The first page from ``page`` on that was ever written, as far as the filesystem knows; None where there is none."""
        offset = self._filesystem.seek_data(self.fd, page * PAGE)
        return None if offset is None else max(page, offset // PAGE)

    def _move(self, call: Callable[[int, Sequence[memoryview], int], int], buffers: Sequence[memoryview], page: int) -> None:
        offset, left = page * PAGE, sum(map(len, buffers))
        while True:
            self._beat()
            moved = call(self.fd, buffers, offset)
            left -= moved
            if left == 0:
                return
            if moved <= 0 or moved % PAGE or left < 0:
                raise ShortTransferError
            buffers, offset = _after(buffers, moved), offset + moved


class SegmentFiles:
    """The segment files of an open directory, opened when needed; the longest unused are closed beyond ``OPEN_FILES_MAX``."""

    def __init__(self, directory: Directory, *, direct: bool, beat: Callable[[], None], writable: bool = True) -> None:
        self._directory = directory
        self._flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        self._beat = beat
        self._open: OrderedDict[int, SegmentFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def using(self, segment: int, *, create: bool = False) -> Iterator[SegmentFile]:
        """The file stays open within. Raises OSError (ENOENT where it is not there and need not be made)."""
        with self._lock:
            file = self._open.pop(segment, None)
            if file is None:
                file = self._open_file(segment, create)
            self._open[segment] = file
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                self._close_idle(OPEN_FILES_MAX)

    def close(self) -> None:
        """Nobody may use one any more."""
        with self._lock:
            self._close_idle(0)

    def _open_file(self, segment: int, create: bool) -> SegmentFile:
        directory, filesystem, name = self._directory, self._directory.filesystem, segment_name(segment)
        try:
            fd = filesystem.open(name, self._flags, directory.fd)
        except FileNotFoundError:
            if not create:
                raise
            fd = filesystem.open(name, self._flags | os.O_CREAT, directory.fd)
            try:
                directory.sync()
            except OSError:
                filesystem.close(fd)
                raise
        return SegmentFile(fd, directory.format.segment_bytes, filesystem, self._beat)

    def _close_idle(self, keep: int) -> None:
        for segment in [segment for segment, file in self._open.items() if not file.users]:
            if len(self._open) <= keep:
                return
            self._directory.filesystem.close(self._open.pop(segment).fd)


def direct_works(directory: Directory, buffer: memoryview) -> bool:
    """Write a page past the page cache and read it back. False where this filesystem refuses that kind of access.

    Also the test that the disk takes writes at all: raises OSError where it does not, ShortTransferError where other bytes
    return.
    """
    direct = _probe(directory, buffer, os.O_DIRECT)
    if not direct:
        _probe(directory, buffer, 0)
    return direct


def direct_reads_work(directory: Directory, buffer: memoryview) -> bool:
    """The same without writing anything. Raises OSError."""
    filesystem = directory.filesystem
    try:
        fd = filesystem.open(FORMAT_FILE, os.O_RDONLY | os.O_DIRECT, directory.fd)
        try:
            filesystem.preadv(fd, [buffer[:PAGE]], 0)
        finally:
            filesystem.close(fd)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return False
        raise
    return True


def _probe(directory: Directory, buffer: memoryview, flags: int) -> bool:
    filesystem, page, back = directory.filesystem, buffer[:PAGE], buffer[PAGE : 2 * PAGE]
    page[:] = os.urandom(PAGE)
    try:
        fd = filesystem.open(PROBE_FILE, os.O_RDWR | os.O_CREAT | flags, directory.fd)
    except OSError as error:
        if flags and error.errno in _NO_DIRECT:
            return False
        raise
    try:
        if filesystem.pwritev(fd, [page], 0) != PAGE or filesystem.preadv(fd, [back], 0) != PAGE or back != page:
            raise ShortTransferError
        filesystem.fdatasync(fd)
    except OSError as error:
        if flags and error.errno in _NO_DIRECT:
            return False
        raise
    finally:
        filesystem.close(fd)
        with contextlib.suppress(OSError):
            filesystem.unlink(PROBE_FILE, directory.fd)
    return True


def _after(buffers: Sequence[Buffer], moved: int) -> list[memoryview]:
    """What is left of ``buffers`` behind their first ``moved`` bytes."""
    left: list[memoryview] = []
    for buffer in buffers:
        if moved < len(buffer):
            left.append(memoryview(buffer)[moved:])
        moved = max(0, moved - len(buffer))
    return left
