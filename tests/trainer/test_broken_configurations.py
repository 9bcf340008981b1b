"""Over a hundred configurations that cannot run, each refused on every rank with a way out (PO-05).

They are rows of broken.py. One world runs many of them: what a refusal leaves behind must not disturb the next run.
"""

import time
import warnings

import pytest
import torch.distributed as dist

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.broken import CONFIGURATIONS, Broken, By

LIMIT_S = 10.0
TABLES = {size: [name for name, row in CONFIGURATIONS.items() if row.world_size == size] for size in (2, 3, 4)}


def refusals(names):
    """What this rank is told of each configuration, and after how many seconds."""
    return {name: refusal(CONFIGURATIONS[name], dist.get_rank()) for name in names}


def refusal(row: Broken, rank: int):
    """The text of the error, or what happened instead."""
    seed_everything()
    sizes = {"tensor_parallel_size": row.t, "pipeline_parallel_size": row.p, "data_parallel_size": row.d}
    start = time.monotonic()
    try:
        with row.around(rank), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warns on rank 0 alone, and ranks would part
            fit(at(row.make, rank), values(sizes | row.strategy, rank), values(row.trainer, rank))
    except Exception as error:
        told = str(error) if isinstance(error, ValueError) else f"another error: {error!r}"
        return told, time.monotonic() - start
    return "it ran", time.monotonic() - start


def fit(make, strategy, trainer):
    module = make()
    callbacks = trainer.pop("callbacks", list)()
    quiet_trainer(PTDPStrategy(**strategy), callbacks=callbacks, **trainer).fit(module, ReplicaBatches([texts(4)]))


def values(arguments, rank):
    return {name: at(value, rank) for name, value in arguments.items()}


def at(value, rank):
    return value.at(rank) if isinstance(value, By) else value


@pytest.fixture(scope="module")
def told():
    """What each rank was told, by configuration."""
    everyone = {}
    for world_size, names in TABLES.items():
        ranks = run_spmd(refusals, world_size=world_size, timeout=120.0, names=names)
        everyone |= {name: [rank[name] for rank in ranks] for name in names}
    return everyone


def test_a_hundred_configurations_are_broken():
    assert len(CONFIGURATIONS) >= 100


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_broken_configuration_is_refused_on_every_rank(told, name):
    texts_, seconds = zip(*told[name], strict=True)
    assert set(texts_) == {texts_[0]}, "all ranks are told the same"
    assert texts_[0].startswith("PTDPStrategy cannot run this:\n- ")
    missing = [fragment for fragment in CONFIGURATIONS[name].told if fragment not in texts_[0]]
    assert not missing, texts_[0]
    assert max(seconds) < LIMIT_S
