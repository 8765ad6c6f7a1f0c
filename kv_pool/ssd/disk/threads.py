"""A fixed number of threads that do the tier's blocking calls: reads first, then writes in an order that a crash cannot harm.

One :class:`Workers` serves one opening of the directory. When that is over (:meth:`Workers.end`, :meth:`Workers.abandon`) a last
job closes it, once every thread is back from the kernel; the next opening has threads of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """``run`` catches what it knows; ``group`` and ``alone`` order writes: of one group, a job that is ``alone`` starts when all
    before it have ended and is over (or says :meth:`Workers.no_longer_alone`) before any after it starts. No group: a read, which
    waits for nobody."""

    run: Callable[[], None]
    group: int | None = None
    alone: bool = False
    order: object = None
    """What it was made for, for whoever gets it back."""


class Workers:
    """``threads`` daemon threads. With more than one, one is kept from writing, so that a read finds a thread soon.

    ``clock`` is monotonic seconds. All methods from any thread.
    """

    def __init__(self, threads: int, *, name: str, clock: Callable[[], float]) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._clock = clock
        self._writers_max = max(1, threads - 1)
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        """By thread."""
        self._since: dict[int, float] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._abandoned = False
        self._last: Job | None = None
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """False where the end has begun: it will not run."""
        with self._changed:
            if self._ending:
                return False
            (self._reads if job.group is None else self._writes).append(job)
            self._changed.notify()
            return True

    def submit_next(self, job: Job) -> bool:
        """From a running job, what is to follow it; also after :meth:`end`. False after :meth:`abandon`."""
        with self._changed:
            if self._abandoned:
                return False
            self._writes.append(job)
            self._changed.notify()
            return True

    def no_longer_alone(self) -> None:
        """From a running job: those behind it may start."""
        thread = threading.get_ident()
        with self._changed:
            self._running[thread] = replace(self._running[thread], alone=False)
            self._changed.notify_all()

    def end(self, last: Job) -> None:
        """Take nothing more. When all is done, run ``last``; then the threads end."""
        with self._changed:
            if not self._ending:
                self._ending, self._last = True, last
            self._changed.notify_all()

    def abandon(self, last: Job) -> list[Job]:
        """:meth:`end`, without what has not started: that is returned, and will not run."""
        with self._changed:
            waiting = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._abandoned = True
            self.end(last)
            return waiting

    def beat(self) -> None:
        """The running job made progress: it does not hang yet."""
        thread = threading.get_ident()
        if thread in self._since:
            self._since[thread] = self._clock()

    def oldest_since(self) -> float | None:
        """When the job that has been silent for longest began or last made progress; None where nothing runs."""
        return min(list(self._since.values()), default=None)

    @property
    def busy(self) -> int:
        """Threads with a job."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._reads) + len(self._writes)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads' end; False where one is still in the kernel."""
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        thread = threading.get_ident()
        while True:
            with self._changed:
                job = self._next()
                while job is None:
                    if self._ending and self._last is None:
                        return
                    self._changed.wait()
                    job = self._next()
                self._running[thread] = job
                self._since[thread] = self._clock()
            try:
                job.run()
            except Exception:
                log.exception("ssd: a job failed in a way it does not know")
            with self._changed:
                del self._running[thread]
                del self._since[thread]
                self._changed.notify_all()  # those that waited for its end, and for its place

    def _next(self) -> Job | None:
        if self._reads:
            return self._reads.popleft()
        if self._ending and not self._writes and not self._running:
            job, self._last = self._last, None
            self._changed.notify_all()  # the others may go home
            return job
        writing = [job for job in self._running.values() if job.group is not None]
        if len(writing) >= self._writers_max:
            return None
        before = writing
        for position, job in enumerate(self._writes):
            if not any(other.group == job.group and (other.alone or job.alone) for other in before):
                del self._writes[position]
                return job
            before = [*before, job]
        return None
