"""All records of the log in compact arrays: key -> record, its place and expiry, and how the chains hang together. Pure.

A record is a small integer (its row). A row exists for what lies on the medium (it has a segment), for what is being written, and
as a *ghost* for a key that is neither but is the parent of one that is: so a record whose parent comes later finds it.

::

    row      key       parent  child  next  previous  segment  page  length  tokens+first  expires
             |           |       '-- first child; siblings are a doubly linked list: unlinking costs O(1)
    table: key -> row    '-- row of the parent
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kv_pool.keys import BlockKey
from kv_pool.ssd.keytable import NONE, KeyTable


class Index:
    """Rows are reused once freed. No method checks that a row exists: callers hold rows of records that do."""

    __slots__ = (
        "_child",
        "_expires",
        "_free",
        "_length",
        "_next",
        "_page",
        "_parent",
        "_previous",
        "_segment",
        "_table",
        "_tokens",
        "stored",
    )

    def __init__(self) -> None:
        self._table = KeyTable()
        self._parent = array("I")
        self._child = array("I")
        self._next = array("I")
        self._previous = array("I")
        self._segment = array("I")
        self._page = array("I")
        self._length = array("I")
        self._tokens = array("I")
        """Twice the tokens, plus one for a record that needs no parent on the medium."""
        self._expires = array("d")
        self._free = NONE
        """First of the freed rows, linked by ``_next``."""
        self.stored = 0
        """Rows that lie on the medium."""

    def __len__(self) -> int:
        return len(self._table)

    # --- rows ---------------------------------------------------------------------------------------------------------------

    def row(self, key: BlockKey) -> int | None:
        return self._table.row(key)

    def key(self, row: int) -> BlockKey:
        return self._table.key(row)

    def parent(self, row: int) -> int:
        """Row of the parent, or NONE."""
        return self._parent[row]

    def ensure(self, key: BlockKey, parent: BlockKey | None) -> int:
        """The row of ``key``, a new one if need be, linked to its parent's, which becomes a ghost where it is not known. A ghost
        that gets its own parent only now is linked now."""
        row = self._table.row(key)
        if row is None:
            row = self._add(key)
        if parent is not None and self._parent[row] == NONE:
            above = self._table.row(parent)
            self._link(row, self._add(parent) if above is None else above)
        return row

    def children(self, row: int) -> list[int]:
        found: list[int] = []
        child = self._child[row]
        while child != NONE:
            found.append(child)
            child = self._next[child]
        return found

    def has_children(self, row: int) -> bool:
        return self._child[row] != NONE

    def remove(self, row: int) -> None:
        """Forget a row that has no place and no children."""
        assert self._segment[row] == NONE
        assert self._child[row] == NONE
        self.unlink(row)
        self._table.remove(row)
        self._next[row] = self._free
        self._free = row

    def unlink(self, row: int) -> None:
        """The row follows nothing any more."""
        parent, before, after = self._parent[row], self._previous[row], self._next[row]
        if parent == NONE:
            return
        if before == NONE:
            self._child[parent] = after
        else:
            self._next[before] = after
        if after != NONE:
            self._previous[after] = before
        self._parent[row] = self._previous[row] = self._next[row] = NONE

    # --- what lies on the medium --------------------------------------------------------------------------------------------

    def on_medium(self, row: int) -> bool:
        return self._segment[row] != NONE

    def segment(self, row: int) -> int:
        """NONE where the row does not lie on the medium; then the next four say nothing."""
        return self._segment[row]

    def page(self, row: int) -> int:
        return self._page[row]

    def length(self, row: int) -> int:
        return self._length[row]

    def tokens(self, row: int) -> int:
        return self._tokens[row] >> 1

    def first(self, row: int) -> bool:
        return bool(self._tokens[row] & 1)

    def expires(self, row: int) -> float:
        return self._expires[row]

    def place(self, row: int, *, segment: int, page: int, length: int, tokens: int, first: bool, expires: float) -> None:
        """The row lies there from now on."""
        if self._segment[row] == NONE:
            self.stored += 1
        self._segment[row] = segment
        self._page[row] = page
        self._length[row] = length
        self._tokens[row] = tokens << 1 | first
        self._expires[row] = expires

    def displace(self, row: int) -> None:
        """The row does not lie on the medium any more."""
        if self._segment[row] != NONE:
            self.stored -= 1
            self._segment[row] = NONE

    def walk(self) -> Iterator[int]:
        """All rows, each after its parent. Nothing may change meanwhile."""
        pending = [row for row in self._table if self._parent[row] == NONE]
        while pending:
            row = pending.pop()
            yield row
            child = self._child[row]
            while child != NONE:
                pending.append(child)
                child = self._next[child]

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _add(self, key: BlockKey) -> int:
        row = self._free
        if row == NONE:
            row = len(self._parent)
            for column in (self._parent, self._child, self._next, self._previous, self._segment):
                column.append(NONE)
            for column in (self._page, self._length, self._tokens):
                column.append(0)
            self._expires.append(0.0)
        else:
            self._free = self._next[row]
            self._parent[row] = self._next[row] = self._previous[row] = NONE
        self._table.add(key, row)
        return row

    def _link(self, row: int, parent: int) -> None:
        after = self._child[parent]
        self._parent[row] = parent
        self._previous[row] = NONE
        self._next[row] = after
        if after != NONE:
            self._previous[after] = row
        self._child[parent] = row
