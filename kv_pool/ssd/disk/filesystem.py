"""The calls that the SSD tier makes of the kernel, in one object, so that tests can put a faulty disk in its place."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

Buffer = memoryview | bytes


class FileSystem:
    """Each method is one system call and raises OSError as it does. Names are relative to an open directory ``dir_fd``.

    A short count from :meth:`preadv` or :meth:`pwritev` is handed on as it is: ``files.py`` judges it.
    """

    def mkdir(self, path: str) -> None:
        """With its parents; none of it readable for others. Fine where it exists."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def open_directory(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        """New files are for their owner alone. Links are not followed: only files of ours are ever opened."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def listdir(self, dir_fd: int) -> list[str]:
        return os.listdir(dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def replace(self, source: str, target: str, dir_fd: int) -> None:
        os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock that ends with the last descriptor of this opening. False where another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def seek_data(self, fd: int, offset: int) -> int | None:
        """Where the next written byte at or after ``offset`` may lie; None where there is none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return offset  # this filesystem cannot say
            raise

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """For directories: what was created or renamed in it stays so."""
        os.fsync(fd)
