"""Keeps what a scheduler has learnt in a small file, so that the next one does not begin with guesses.

Written every minute and at the end, on a thread of its own, as a whole or not at all. A file that cannot be read, or written,
costs a line in the log; one that is no such file, or damaged, is put aside and not overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import platformdirs

from scheduler.speeds import BYTES_MAX, Speeds, SpeedsError, from_json, to_json

log = logging.getLogger(__name__)

AUTO: Final = "auto"
PERIOD_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0


def speeds_file(setting: str, model: str) -> SpeedsFile | None:
    """The file that ``scheduler.speeds_file`` means where ``model`` is served: None where it is empty, or ``auto`` and the model
    is not said. The automatic one lies in the state folder of this machine's user, and each model has its own."""
    if not setting or (setting == AUTO and not model):
        return None
    if setting != AUTO:
        return SpeedsFile(Path(setting).expanduser(), model)
    name = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
    return SpeedsFile(Path(platformdirs.user_state_dir("moonpool")) / "speeds" / f"{name}.json", model)


class SpeedsFile:
    """``model`` says what the speeds hold for; those of another are not taken."""

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._model = model

    def load(self) -> Speeds | None:
        """What is there, None where that is nothing of use. Never raises for what the file is."""
        try:
            speeds, model = from_json(self._read())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: what was learnt of speeds cannot be read: %s", self.path, error.strerror)
            return None
        except SpeedsError as error:
            log.warning("%s: not taken, and put aside: %s", self.path, error)
            with contextlib.suppress(OSError):
                os.replace(self.path, self.path.with_name(f"{self.path.name}.refused"))
            return None
        if model != self._model:
            log.info("%s: learnt with another model, not taken", self.path)
            return None
        return speeds

    def save(self, speeds: Speeds) -> None:
        """Put ``speeds`` there. Raises OSError, or SpeedsError; then what was there before still is."""
        data = to_json(speeds, self._model)
        if self.path.exists() and not self.path.is_file():
            raise FileExistsError(errno.EEXIST, "not a plain file", str(self.path))
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device would have no beginning, or no end
                raise FileExistsError(errno.EEXIST, "not a plain file", str(self.path))
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(BYTES_MAX + 1)
        finally:
            os.close(descriptor)


class SpeedsKeeper:
    """Saves what ``learnt`` gives, when it is another than before. ``stop`` saves a last time."""

    def __init__(self, file: SpeedsFile, learnt: Callable[[], Speeds], *, period_s: float = PERIOD_S) -> None:
        self._file = file
        self._learnt = learnt
        self._period_s = period_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speeds", daemon=True)
        self._saved = Speeds()
        self._complaint = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits a few seconds for a slow disk, then leaves it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(self._period_s)
            speeds = self._learnt()
            if speeds == self._saved:
                continue
            try:
                self._file.save(speeds)
            except (OSError, SpeedsError) as error:
                self._complain(error)
            else:
                self._saved, self._complaint = speeds, ""

    def _complain(self, error: OSError | SpeedsError) -> None:
        """Once for each reason, not every minute."""
        complaint = (isinstance(error, OSError) and error.strerror) or str(error)
        if complaint != self._complaint:
            log.warning("%s: what was learnt of speeds is not kept: %s", self._file.path, complaint)
        self._complaint = complaint
