"""The memory that tables, outputs and captured graphs may take, on the device and the host."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class GraphLimits:
    """The bounds of one worker, known before the KV cache is sized.

    Attributes:
        taps: the taps that one request may have.
        bank_bytes: of the vectors of all tenants.
        bank_share: the part of the bank that one tenant may have.
        step_bytes: of what the requests read in one later step, all together.
        ring_bytes: of what they read in later steps and what has not gone to the host; at least twice `step_bytes`.
        prompt_bytes: of what the requests read of their prompts in one step, all together.
        graphs, graph_bytes: how many captured graphs there are at most, and their memory.
        chain_bytes: of the values that the breaks of one chain of graphs keep.
        host_bytes: of page-locked memory on the host.
        emitted_bytes: of what the program of one request leaves in one step.
        programs: how many programs there are at most.
        program_bytes: of the constants of programs, and of what they carry from step to step.
        program_share: the part of that memory that one tenant may have.
        shared_bytes: requests share a constant of more bytes if its contents are equal; of a smaller one each has its own.

    Size: data, one number for each bound.
    """

    taps: int = 128
    bank_bytes: int = 64 * MIB
    bank_share: float = 0.5
    step_bytes: int = 32 * MIB
    ring_bytes: int = 128 * MIB
    prompt_bytes: int = 96 * MIB
    graphs: int = 128
    graph_bytes: int = 512 * MIB
    chain_bytes: int = 128 * MIB
    host_bytes: int = 1024 * MIB
    emitted_bytes: int = 1 * MIB
    programs: int = 64
    program_bytes: int = 256 * MIB
    program_share: float = 0.75
    shared_bytes: int = 64 << 10

    def device_bytes(self, slots: int, sites: int, rows: int) -> int:
        """Return what all of it may take of the device, to be kept free when the KV cache is sized.

        Args:
            slots: the most requests in a batch.
            sites: the sites of the model.
            rows: the most rows of a step.
        """
        tables = (slots + 1) * ((2 * sites + RECORD * self.taps) * 4 + 4) + rows * 28
        output = self.step_bytes + self.ring_bytes + self.prompt_bytes + self.emitted_bytes
        return tables + self.bank_bytes + output + self.graph_bytes + self.program_bytes


# The numbers of one tap in the tables: eight integers and eight floats.
RECORD = 16
