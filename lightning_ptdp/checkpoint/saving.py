"""Writing a checkpoint folder together: prepared by one rank, written by all, given its name by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lightning_ptdp.checkpoint import folder, whole_or_absent
from lightning_ptdp.checkpoint.checked_files import checksums_of, faults_of
from lightning_ptdp.checkpoint.errors import CheckpointError, DamagedFileError
from lightning_ptdp.checkpoint.folder import Keys
from lightning_ptdp.checkpoint.rectangles import Located
from lightning_ptdp.comm.collectives import broadcast_object, gather_objects


def save_folder(
    path: Path,
    tensors: Mapping[Keys, Located],
    objects: Mapping[Keys, Any],
    meta: Mapping[str, Any],
    order: Sequence[str],
    group: ProcessGroup,
) -> None:
    """Save a checkpoint; every rank of the group calls it, and it is whole for all when it returns.

    Args:
        path: of the folder.
        tensors, objects: those that this rank writes, and no other.
        meta: everything else; that of the group's first rank is saved.
        order: the names of the plain model, in its order.
        group: the ranks that write.

    Raises:
        CheckpointError: on every rank, when one of them failed; what was there before is untouched.
    """
    with _leaving_nothing(path, group):
        is_first = group.rank() == 0
        what = f"saving the checkpoint {path} failed"
        together(lambda: whole_or_absent.prepare(path) if is_first else None, group, what)
        checksums = folder.write(whole_or_absent.unfinished(path), tensors, objects, order, group, what)
        everyone = gather_objects(checksums, group)

        def finish() -> None:
            meta_file = whole_or_absent.unfinished(path) / folder.META
            torch.save(dict(meta), meta_file)
            whole_or_absent.sync(meta_file)
            merged = {name: found for each in everyone for name, found in each.items()}
            whole_or_absent.commit(path, {**merged, folder.META: checksums_of(meta_file)})

        together(finish if is_first else None, group, what)


@contextmanager
def _leaving_nothing(path: Path, group: ProcessGroup) -> Iterator[None]:
    """Within, a failure of which all ranks know, so that none writes any more, deletes what is half written."""
    try:
        yield
    except CheckpointError:
        if group.rank() == 0:
            with suppress(OSError):
                whole_or_absent.remove(whole_or_absent.unfinished(path))
        raise


def verify(path: Path, group: ProcessGroup, *, contents: bool) -> None:
    """Check every file of a checkpoint folder against its manifest, each rank some of them.

    Args:
        path: of the folder.
        group: the ranks that check.
        contents: whether contents are read and compared, too; a `Folder` does it for what it reads.

    Raises:
        CheckpointError: on every rank, with what is wrong.
    """

    def check() -> None:
        listed = whole_or_absent.files(path)
        if not listed and not folder.is_folder(path):
            raise ValueError(f"the folder {path} is no checkpoint: it has no {folder.METADATA} and {folder.META}")
        faults = faults_of(listed[group.rank() :: group.size()], contents=contents)
        if faults:
            raise DamagedFileError("; ".join(faults))

    together(check, group, f"loading the checkpoint {path} failed")


def newest_whole(beside: Path, group: ProcessGroup) -> Path | None:
    """The newest of the other checkpoint folders beside one, that is whole; every rank calls it."""
    others = [p for p in beside.parent.glob("*") if folder.is_folder(p) and p.resolve() != beside.resolve()]
    newest_first = sorted(others, key=lambda p: p.stat().st_mtime, reverse=True)
    for path in broadcast_object(newest_first, 0, group):
        with suppress(CheckpointError):
            verify(path, group, contents=True)
            return Path(path)
    return None


def together(act: Callable[[], Any] | None, group: ProcessGroup, what: str) -> None:
    """Act on some ranks, and let all of them know how it went.

    Raises:
        CheckpointError: on every rank, with the first rank's cause.
    """
    failure: BaseException | None = None
    try:
        if act is not None:
            act()
    except Exception as raised:
        failure = raised
    told = gather_objects(
        None if failure is None else (f"{type(failure).__name__}: {failure}", isinstance(failure, DamagedFileError)),
        group,
    )
    for rank, found in enumerate(told):
        if found is not None:
            text, is_damage = found
            error = CheckpointError(f"{what} on rank {rank}: {text}")
            error.is_damage = is_damage
            raise error from failure
