"""A live scheduler's journal, done again: the same inputs at the same times must give the same plans and actions, byte for
byte."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from scheduler.journal import JournalError, pack, read_journal
from scheduler.plan import Plan, RouteRequest
from scheduler.state import SchedulerState

__all__ = ["JournalError", "ReplayReport", "replay_journal"]


class ReplayReport(BaseModel):
    """``first_difference`` is the number of the first row (the head is 1) whose answer was another one, with both answers' packed
    bytes in hexadecimal."""

    model_config = ConfigDict(frozen=True)

    rows: int
    plans: int
    rejections: int
    equal: bool
    first_difference: int | None = None
    recorded: str = ""
    replayed: str = ""


def replay_journal(path: Path) -> ReplayReport:
    """Raises JournalError where ``path`` is not a journal, or is damaged."""
    try:
        with path.open("rb") as stream:
            settings, order, rows = read_journal(stream)
            state = SchedulerState(settings, order=order)
            number, plans, rejections = 1, 0, 0
            for each in rows:
                number += 1
                try:
                    if isinstance(each.input, RouteRequest):
                        answer = state.route(each.input, each.now)
                        plans += isinstance(answer, Plan)
                        rejections += not isinstance(answer, Plan)
                    else:
                        answer = state.handle(each.input, each.now)
                except Exception as error:  # whatever a damaged row makes of an input, it is the row's fault
                    raise JournalError(f"{path}: row {number}: no scheduler was given this ({type(error).__name__})") from error
                again = pack(answer)
                if again != each.output:
                    return ReplayReport(
                        rows=number - 1, plans=plans, rejections=rejections, equal=False, first_difference=number,
                        recorded=each.output.hex(), replayed=again.hex(),
                    )  # fmt: skip
            return ReplayReport(rows=number - 1, plans=plans, rejections=rejections, equal=True)
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from error
