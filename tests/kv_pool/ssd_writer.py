"""Writes blocks into an SSD directory for as long as it lives, and tells on stdout what it may: to be killed by a test.

``open SEGMENT GENERATION`` comes before the batch that reuses a segment is sent, ``done SEGMENT GENERATION PAGE LENGTH KEY``
after a record was acknowledged.
"""

from __future__ import annotations

import random
import sys

from kv_pool.ssd.records import PAGE, BatchWritten
from tests.kv_pool.ssd_scene import Filling, Scene, Written, key_of

SEGMENTS = 6
SEGMENT_BYTES = 48 * PAGE
SLOT_BYTES = 3 * PAGE
BATCH_BLOCKS = 4
IN_FLIGHT = 3


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_scene(directory: str) -> Scene:
    return Scene(
        directory,
        segments=SEGMENTS,
        segment_bytes=SEGMENT_BYTES,
        slots=IN_FLIGHT * BATCH_BLOCKS,
        slot_bytes=SLOT_BYTES,
        threads=3,
    )


def run(directory: str, seed: int) -> None:
    draw = random.Random(seed)
    scene = make_scene(directory)
    generations = dict.fromkeys(range(SEGMENTS), 0)
    generations |= {segment.id: segment.generation for segment in scene.start().segments}
    number = seed * 1_000_000
    free = list(range(IN_FLIGHT))
    fillings: list[Filling] = []
    sent: dict[int, tuple[int, list[Written]]] = {}
    rounds = draw.sample(range(SEGMENTS), SEGMENTS)
    while True:
        while free:
            if len(fillings) < 2:
                busy = {filling.segment for filling in fillings}
                busy |= {block.place.segment for _, blocks in sent.values() for block in blocks}
                segment = next(segment for segment in rounds if segment not in busy)  # as the log does
                rounds.remove(segment)
                rounds.append(segment)
                generations[segment] += 1
                fillings.append(Filling(segment, generations[segment]))
                say(f"open {segment} {generations[segment]}")
            filling = draw.choice(fillings)
            chosen = []
            for _ in range(draw.randint(1, BATCH_BLOCKS)):
                number += 1
                chosen.append((key_of(number), draw.randint(1, SLOT_BYTES)))
            seal = filling.page + BATCH_BLOCKS * 4 * 2 + 2 > SEGMENT_BYTES // PAGE
            place = free.pop()
            batch, written = scene.batch(filling, chosen, seal=seal, slot=place * BATCH_BLOCKS)
            if seal:
                fillings.remove(filling)
            scene.disk.write(batch)
            sent[batch.id] = (place, written)
        answer = scene.wait_for(BatchWritten)
        assert answer.ok
        place, written = sent.pop(answer.id)
        free.append(place)
        for block in written:
            where = block.place
            say(f"done {where.segment} {where.generation} {where.page} {where.length} {block.key.hex()}")


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
