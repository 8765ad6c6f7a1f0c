"""The progress bar of ``moonpool simulate``; nothing where the output is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, float], None]]:
    """Gives a function to be told how many are done and at what simulated second."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _second: None
        return
    columns = TextColumn("{task.fields[at]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=total, at="")
        yield lambda done, second: bar.update(task, completed=done, at=f"{second:,.0f} s")
