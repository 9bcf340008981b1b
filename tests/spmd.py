"""Multi-rank tests without the price of starting processes: the public face of the pool.

    @pytest.mark.parametrize("bias", [True, False])
    @spmd(world_size=2)
    def test_row_parallel_equals_linear(bias):      # runs on every rank
        ...

    def test_schedules_agree():                     # the parent compares what the ranks return
        runs = [run_spmd(train, world_size=4, schedule=name) for name in ("gpipe", "1f1b")]
        assert runs[0] == runs[1]

How it is done: spmd_pool.py in this process, spmd_worker.py in the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from tests.spmd_pool import Body, Pool, SpmdError, check_sendable

__all__ = ["run_spmd", "spmd", "warm_pool", "close_pool", "PoolEnvironment", "SpmdError"]


def run_spmd(body: Body, /, world_size: int = 2, timeout: float = 20.0, **kwargs: Any) -> list[Any]:
    """Run `body(**kwargs)` on every rank of a fresh world and return the results in the order of ranks.

    Args:
        body: a module-level function; it is sent by name. It finds a default process group.
        world_size: number of ranks.
        timeout: seconds after which ranks that are not through count as hanging.
        kwargs: sent, as results are, by torch.save: ranks never share memory with the caller.

    Raises:
        ValueError: the body is not a module-level function, or an argument cannot be sent.
        SpmdError: a rank raised, died, hung, or left something behind.
    """
    __tracebackhide__ = True
    return _pool().run(body, world_size, timeout, kwargs)


def spmd(world_size: int = 2, timeout: float = 20.0) -> Callable[[Body], Body]:
    """Make a test whose body runs on every rank of a fresh world, and which fails if any rank fails.

    Arguments from parametrize and fixtures are passed on, so they must be values that torch.save can send.
    """

    def decorate(body: Body) -> Body:
        check_sendable(body)

        @functools.wraps(body)  # pytest follows it to the body's signature
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            _pool().run(body, world_size, timeout, kwargs)

        test.spmd_body = body  # where a worker finds it
        return test

    return decorate


def warm_pool() -> None:
    """Start what takes long, and return at once."""
    _pool().warm()


def close_pool() -> None:
    """End all workers and remove what the pool wrote; the next use starts a pool anew."""
    if _pool.cache_info().currsize:
        _pool().close()
        _pool.cache_clear()


class PoolEnvironment(ClusterEnvironment):
    """Tells a Trainer inside a body that the ranks are running and their world exists."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0  # never dialled: Lightning takes the default process group that it finds

    @staticmethod
    def detect() -> bool:
        """Never chosen by guess."""
        return False

    def world_size(self) -> int:
        """The number of ranks of the body."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Accept the size that is."""
        _check_same("world size", size, self.world_size())

    def global_rank(self) -> int:
        """The rank in the body's world."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Accept the rank that is."""
        _check_same("global rank", rank, self.global_rank())

    def local_rank(self) -> int:
        """The global rank: the world is one node."""
        return dist.get_rank()

    def node_rank(self) -> int:
        """The first and only node."""
        return 0


@functools.cache
def _pool() -> Pool:
    return Pool()


def _check_same(what: str, asked: int, found: int) -> None:
    if asked != found:
        raise RuntimeError(
            f"the pool's world exists already, so its {what} cannot be set; asked for {asked}, found {found}; "
            f"give the Trainer devices=torch.distributed.get_world_size() and num_nodes=1"
        )
