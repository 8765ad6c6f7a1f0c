"""Workers that die or freeze at an exact point of a request's life, on order.

The production classes know nothing of this: these are subclasses that the test's launcher puts in their place. An order is a
file named
``<worker_id>.<point>`` in the fault folder whose content is the signal; the worker that reaches the point takes the file away
(so it
fires once) and sends itself the signal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from decode_worker.actor import DecodeActor
from decode_worker.worker import DecodeWorker
from prefill_worker.actor import PrefillActor
from prefill_worker.worker import PrefillWorker

FOLDER_VARIABLE = "TEST_FAULT_FOLDER"


def arm(folder: Path, worker_id: str, point: str, sig: signal.Signals) -> Path:
    """Order one fault; returns the file whose disappearance says that it happened."""
    order = folder / f"{worker_id}.{point}"
    order.write_text(str(int(sig)))
    return order


class FaultPoint:
    """Fires the orders of one worker."""

    def __init__(self, worker_id: str, folder: str) -> None:
        self._worker_id = worker_id
        self._folder = Path(folder)

    def reached(self, point: str) -> None:
        order = self._folder / f"{self._worker_id}.{point}"
        try:
            sig = int(order.read_text())
            order.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), sig)


class FaultyPrefillWorker(PrefillWorker):
    fault: FaultPoint

    def _order_load(self, prompt: Any, first: int, last: int) -> None:
        super()._order_load(prompt, first, last)
        self.fault.reached("loading")

    def _run(self, piece: Any) -> None:
        self.fault.reached("computing")
        super()._run(piece)

    def _order_hand_over(self, prompt: Any) -> None:
        self.fault.reached("handing_over")
        super()._order_hand_over(prompt)


class FaultyDecodeWorker(DecodeWorker):
    fault: FaultPoint

    def _order_load(self, sequence: Any, first: int, now: float) -> None:
        super()._order_load(sequence, first, now)
        self.fault.reached("loading")

    def _load_ended(self, sequence: Any, ended: Any, now: float) -> None:
        self.fault.reached("joining")
        super()._load_ended(sequence, ended, now)

    def _run(self, batch: Any) -> None:
        if any(s.answer_index >= 5 for s in batch):
            self.fault.reached("decoding")
        super()._run(batch)


class FaultyPrefillActor(PrefillActor):
    def _worker_class(self) -> type[FaultyPrefillWorker]:
        return FaultyPrefillWorker

    def __init__(self, settings: dict[str, Any], **common: Any) -> None:
        self._fault = FaultPoint(common["worker_id"], os.environ[FOLDER_VARIABLE])
        super().__init__(settings, **common)

    def start(self, core: Any) -> None:
        core.fault = self._fault
        super().start(core)

    def submit(self, task: Any) -> str | None:
        self._fault.reached("queued")
        return super().submit(task)


class FaultyDecodeActor(DecodeActor):
    def _worker_class(self) -> type[FaultyDecodeWorker]:
        return FaultyDecodeWorker

    def __init__(self, settings: dict[str, Any], **common: Any) -> None:
        self._fault = FaultPoint(common["worker_id"], os.environ[FOLDER_VARIABLE])
        super().__init__(settings, **common)

    def start(self, core: Any) -> None:
        core.fault = self._fault
        super().start(core)

    def submit(self, task: Any) -> str | None:
        self._fault.reached("queued")
        return super().submit(task)
