"""Gangs: requests that start in the same step, and the joint blocks that see their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from executor.interleave.machine.blocks import Block, Blocks


class Gangs:
    """The gangs of one worker.

    Args:
        blocks: the blocks that are here.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._seen: dict[str, set[str]] = {}  # the requests that each joint block saw in its last step

    def apart(self, present: Iterable[str]) -> set[str]:
        """Return the traces whose gangs start in this step without some of their requests.

        Args:
            present: the keys of the blocks in the step, before it has begun.
        """
        starting: Counter[str] = Counter()
        counts: dict[str, int] = {}
        for key in present:
            block = self._blocks.live.get(key)
            if block is not None and block.facts.gang and block.step < 0:
                starting[block.facts.trace] += 1
                counts[block.facts.trace] = block.facts.gang
        refused = Counter(self._blocks.refused.values()) if starting else Counter()
        for trace in starting:
            refused[trace] += sum(block.lost for block in self._blocks.gang_of(trace))
        return {trace for trace, count in starting.items() if count + refused[trace] < counts[trace]}

    def seeing(self, present: Collection[str]) -> list[tuple[Block, tuple[str, ...]]]:
        """Return the live joint blocks that are in a step, each with the requests that it sees.

        Args:
            present: the requests of the step.
        """
        found = []
        for trace, blocks in self._blocks.joint.items():
            requests = tuple(block.key for block in self._blocks.gang_of(trace) if block.key in present)
            if requests:
                found += [(joint, requests) for joint in blocks if joint.key in self._blocks.live]
        return found

    def keep_step(self, joint: Block, requests: Iterable[str]) -> bool:
        """Return whether the requests that a joint block sees are in one step of their generations.

        Requests may leave the joint block. No request joins it.
        """
        now = set(requests)
        before = self._seen.get(joint.key, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in self._blocks.live}
        self._seen[joint.key] = now
        steps = {self._blocks.all[key].step for key in now if key in self._blocks.live}
        return now <= before and steps <= {joint.step}
