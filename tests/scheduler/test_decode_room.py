"""Room at a decode worker is bounded by its batch as well as by its blocks."""

from __future__ import annotations

import pytest

from decode_worker.task import DecodeLoad
from scheduler.decode_room import Charge, DecodeRoom


@pytest.mark.parametrize(("running", "room"), [(3, True), (4, False), (6, False)])
def test_a_worker_whose_batch_is_full_has_no_room_however_many_blocks_are_free(running: int, room: bool):
    decode = DecodeRoom()
    decode.report(DecodeLoad(waiting=0, running=running, free_blocks=900, total_blocks=1000, step_s=0.1, batch_max=4), now=1.0)
    assert (decode.blocks > 0) == room


def test_what_was_given_since_the_report_counts_too():
    decode = DecodeRoom()
    decode.report(DecodeLoad(0, 0, 1000, 1000, 0.0, batch_max=2), now=1.0)
    decode.assign(("a", 0), Charge(2.0, 9.0, 100, 2, 2, 1.1))
    assert decode.blocks > 0
    decode.assign(("b", 0), Charge(2.0, 9.0, 100, 2, 2, 1.2))
    assert decode.blocks <= 0
    decode.end(("a", 0))
    assert decode.blocks > 0


def test_the_limit_survives_the_wire():
    load = DecodeLoad(1, 2, 3, 4, 0.5, (("r", 1),), batch_max=7)
    assert DecodeLoad.from_wire(load.to_wire()) == load
