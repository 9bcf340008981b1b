"""The grid of tensor x data x pipeline parallelism: where a rank stands in it, and who its peers are.

    global rank = ((p - 1 - pipeline) * d + data) * t + tensor

The tensor axis is innermost, so that tensor peers share a node. The pipeline axis is reversed: global rank 0 owns the
last stage, where the loss is, so that loggers, progress bars and code under ``is_global_zero`` see real values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's position on the three axes."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The sizes of the three axes, and the arithmetic between a global rank and its coordinate."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks, t * p * d."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def replica_size(self) -> int:
        """Number of ranks that together hold the model once."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def coordinate(self, rank: int) -> Coordinate:
        """Find the position of a global rank."""
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        reversed_pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinate(tensor=tensor, data=data, pipeline=self.pipeline_parallel_size - 1 - reversed_pipeline)

    def rank(self, coordinate: Coordinate) -> int:
        """Find the global rank at a position."""
        reversed_pipeline = self.pipeline_parallel_size - 1 - coordinate.pipeline
        return (reversed_pipeline * self.data_parallel_size + coordinate.data) * self.tensor_parallel_size + (
            coordinate.tensor
        )

    def tensor_ranks(self, coordinate: Coordinate) -> list[int]:
        """List the global ranks of the tensor peers of a position, in the order of their tensor coordinate."""
        return [
            self.rank(Coordinate(i, coordinate.data, coordinate.pipeline)) for i in range(self.tensor_parallel_size)
        ]

    def data_ranks(self, coordinate: Coordinate) -> list[int]:
        """List the global ranks that hold the same shard in each replica, in the order of their data coordinate."""
        return [
            self.rank(Coordinate(coordinate.tensor, i, coordinate.pipeline)) for i in range(self.data_parallel_size)
        ]

    def pipeline_ranks(self, coordinate: Coordinate) -> list[int]:
        """List the global ranks of one pipeline, from the first stage to the last."""
        return [
            self.rank(Coordinate(coordinate.tensor, coordinate.data, i)) for i in range(self.pipeline_parallel_size)
        ]

    def replica_ranks(self, coordinate: Coordinate) -> list[int]:
        """List the global ranks that together hold one replica of the model, ascending."""
        return sorted(
            self.rank(Coordinate(tensor, coordinate.data, pipeline))
            for tensor in range(self.tensor_parallel_size)
            for pipeline in range(self.pipeline_parallel_size)
        )

    def describe(self, rank: int) -> str:
        """Name a rank in messages: ``rank 3 (pipeline rank 0, replica 1, tensor rank 1)``."""
        at = self.coordinate(rank)
        return f"rank {rank} (pipeline rank {at.pipeline}, replica {at.data}, tensor rank {at.tensor})"
