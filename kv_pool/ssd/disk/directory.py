"""The directory of a node's SSD tier: whose it is, which format it has, who has it open.

::

    FORMAT               JSON: format, version, store (hex), segment_bytes, segments
    LOCK                 flock'ed while a node has the directory open
    BUDGET               what was written in the last 24 hours (budget_file.py)
    segment-000000.kv    one per segment, made when it is first written (files.py)

Nothing that is not understood is ever changed or removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import Final

from kv_pool.ssd.disk.filesystem import FileSystem
from kv_pool.ssd.format import STORE_BYTES, DirectoryFormat, decode_format, encode_format
from kv_pool.ssd.records import PAGE, SsdFormatError

FORMAT_BYTES_MAX: Final = 64 * 1024
FORMAT_FILE: Final = "FORMAT"
LOCK_FILE: Final = "LOCK"
TEMPORARY: Final = ".tmp"
"""Ends the name of a file that is not complete yet; one that is found was left behind by a crash."""
SEGMENT_NAME: Final = re.compile(r"segment-([0-9]{6,})\.kv")


class DirectoryInUseError(Exception):
    """Another process has the directory open (or died so recently that the kernel still works for it)."""


class ForeignDeviceError(Exception):
    """The directory is on another filesystem than before: its own is not mounted, and this one is not ours to fill."""


def segment_name(segment: int) -> str:
    return f"segment-{segment:06d}.kv"


class Directory:
    """An open directory, locked until :meth:`close`. The descriptor stays with this directory whatever is renamed or mounted."""

    def __init__(self, path: str, fd: int, lock_fd: int, layout: DirectoryFormat, filesystem: FileSystem) -> None:
        self.path = path
        self.fd = fd
        self.format = layout
        self.filesystem = filesystem
        self._lock_fd = lock_fd

    @classmethod
    def open(
        cls, path: str, *, segments: int, segment_bytes: int, filesystem: FileSystem, device: int | None = None
    ) -> Directory:
        """Open ``path``, or make it. ``device``: the filesystem that it was on before (``st_dev``), None at the first time.

        Raises SsdFormatError where its content is not ours or not of this format, DirectoryInUseError, ForeignDeviceError,
        OSError.
        """
        if device is None or _device_of_parent(path, filesystem) == device:
            filesystem.mkdir(path)
        fd = filesystem.open_directory(path)
        lock_fd = -1
        try:
            if device is not None and filesystem.fstat(fd).st_dev != device and read_format(fd, filesystem) is None:
                raise ForeignDeviceError
            lock_fd = filesystem.open(LOCK_FILE, os.O_RDWR | os.O_CREAT, fd)
            if not filesystem.lock(lock_fd):
                raise DirectoryInUseError
            found = read_format(fd, filesystem)
            names = filesystem.listdir(fd)
            if found is None:
                if any(SEGMENT_NAME.fullmatch(name) for name in names):
                    raise SsdFormatError(
                        f"{path} has segment files but no {FORMAT_FILE} file: empty it, or name another directory"
                    )
                found = DirectoryFormat(os.urandom(STORE_BYTES), segment_bytes, segments)
                replace_file(FORMAT_FILE, encode_format(found), fd, filesystem)
            elif found.segment_bytes != segment_bytes or found.segments > segments:
                raise SsdFormatError(
                    f"{path} was made for {found.segments} segments of {found.segment_bytes} bytes, asked for are {segments} of "
                    f"{segment_bytes}: set these sizes back, or empty the directory (its blocks are recomputed when needed)"
                )
            elif found.segments < segments:
                found = DirectoryFormat(found.store, segment_bytes, segments)
                replace_file(FORMAT_FILE, encode_format(found), fd, filesystem)
            for name in names:
                if name.endswith(TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        filesystem.unlink(name, fd)
            return cls(path, fd, lock_fd, found, filesystem)
        except BaseException:
            if lock_fd >= 0:
                filesystem.close(lock_fd)
            filesystem.close(fd)
            raise

    @property
    def segment_pages(self) -> int:
        return self.format.segment_bytes // PAGE

    @property
    def device(self) -> int:
        return self.filesystem.fstat(self.fd).st_dev

    def segments_found(self) -> list[int]:
        """Ids of the segment files that are there, in order; those beyond ``format.segments`` are no concern of ours."""
        matches = (SEGMENT_NAME.fullmatch(name) for name in self.filesystem.listdir(self.fd))
        ids = sorted(int(match.group(1)) for match in matches if match is not None)
        return [segment for segment in ids if segment < self.format.segments]

    def still_there(self) -> bool:
        """Whether ``path`` still leads here, and to the lock that we hold."""
        try:
            lock = self.filesystem.stat(os.path.join(self.path, LOCK_FILE))
        except (FileNotFoundError, NotADirectoryError):
            return False
        own = self.filesystem.fstat(self._lock_fd)
        return (lock.st_dev, lock.st_ino) == (own.st_dev, own.st_ino)

    def sync(self) -> None:
        """Names that were added stay after a power cut."""
        self.filesystem.fsync(self.fd)

    def close(self) -> None:
        """Gives the lock up."""
        self.filesystem.close(self._lock_fd)
        self.filesystem.close(self.fd)


def read_format(dir_fd: int, filesystem: FileSystem) -> DirectoryFormat | None:
    """What FORMAT says; None where there is none. Raises SsdFormatError where it cannot be understood, OSError."""
    try:
        fd = filesystem.open(FORMAT_FILE, os.O_RDONLY, dir_fd)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(FORMAT_BYTES_MAX)
        size = filesystem.preadv(fd, [memoryview(content)], 0)
    finally:
        filesystem.close(fd)
    try:
        return decode_format(bytes(content[:size]))
    except SsdFormatError as error:
        raise SsdFormatError(f"{error}: use the version that wrote it, or name another directory for the SSD tier") from error


def replace_file(name: str, content: bytes, dir_fd: int, filesystem: FileSystem) -> None:
    """Write a small file so that after a crash either the old or the new content is there. Raises OSError."""
    fd = filesystem.open(name + TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        if filesystem.pwritev(fd, [content], 0) != len(content):
            raise OSError(errno.ENOSPC, "short write")
        filesystem.fdatasync(fd)
    finally:
        filesystem.close(fd)
    filesystem.replace(name + TEMPORARY, name, dir_fd)
    filesystem.fsync(dir_fd)


def _device_of_parent(path: str, filesystem: FileSystem) -> int | None:
    try:
        return filesystem.stat(os.path.dirname(os.path.abspath(path))).st_dev
    except (FileNotFoundError, NotADirectoryError):
        return None
