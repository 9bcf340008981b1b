"""A checkpoint as a folder, in the form that Lightning's `consolidate_checkpoint` tool reads.

    __0_0.distcp ...   tensors, by torch.distributed.checkpoint     .metadata   where each lies
    meta.pt            everything else, plain values                manifest.json   sizes and checksums of files

Tensors lie there under the names of the plain model, `model.<name>` and `optimizer_0.state.<name>.<key>`, with whole
sizes; which rank wrote what part is of no interest to a reader.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from lightning_ptdp.checkpoint.checked_files import File, Summing, opened
from lightning_ptdp.checkpoint.errors import CheckpointError, DamagedFileError, naming
from lightning_ptdp.checkpoint.rectangles import Located, Size
from lightning_ptdp.checkpoint.stored_tensor import read_tensor
from lightning_ptdp.checkpoint.whole_or_absent import files
from lightning_ptdp.host.torch import slice_of

META = "meta.pt"
METADATA = ".metadata"

_DAMAGE = (OSError, EOFError, RuntimeError)  # what torch raises on a file that is not what it wrote

Keys = tuple[str | int, ...]
"""What leads to a value in the nested checkpoint."""


def key_of(path: Keys) -> str:
    """The flat name of a value."""
    return ".".join(map(str, path))


def is_folder(path: str | Path) -> bool:
    """Whether this is a checkpoint of this form, ours or Lightning's."""
    return (Path(path) / METADATA).is_file() and (Path(path) / META).is_file()


# -- writing ----------------------------------------------------------------------------------------------------------


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans what this rank writes. order: the names of the plain model, in its order."""

    def __init__(self, tensors: Mapping[Keys, Located], objects: Mapping[Keys, Any], order: Sequence[str]) -> None:
        super().__init__()
        self._tensors = {key_of(path): located for path, located in tensors.items()}
        self._objects = {key_of(path): value for path, value in objects.items()}
        self._paths = {key_of(path): path for path in (*tensors, *objects)}
        self._order = order

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.mappings, self.is_coordinator = state_dict, self._paths, is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([*self._tensor_items(), *self._object_items()], planner_data=self._paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        paths: Mapping[str, Keys] = metadata.planner_data
        numbers = {name: i for i, name in enumerate(self._order)}

        def order_of(key: str) -> tuple[bool, str, int]:
            top, *rest = paths[key]
            name = rest[0] if len(rest) == 1 else rest[1]
            return top != "model", str(top), numbers.get(str(name), len(numbers))

        found = {key: metadata.state_dict_metadata[key] for key in sorted(metadata.state_dict_metadata, key=order_of)}
        return plans, replace(metadata, state_dict_metadata=found)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[index.fqn], stream)
            return stream
        return _view_at(self._tensors[index.fqn], index)

    def _tensor_items(self) -> Iterator[WriteItem]:
        for key, located in self._tensors.items():
            for rectangle in located.rectangles:
                offset, size = torch.Size(rectangle.offset), rectangle.view.size()
                yield WriteItem(
                    index=MetadataIndex(key, offset),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offset, size),
                        properties=TensorProperties.create_from_tensor(rectangle.view),
                        size=torch.Size(located.size),
                    ),
                )

    def _object_items(self) -> Iterator[WriteItem]:
        for key in self._objects:
            yield WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


def write(
    folder: Path,
    tensors: Mapping[Keys, Located],
    objects: Mapping[Keys, Any],
    order: Sequence[str],
    group: ProcessGroup,
    what: str,
) -> dict[str, list[int]]:
    """Write this rank's part of a checkpoint; every rank of the group calls it.

    Args:
        folder: made by one rank, for all.
        tensors, objects: those that this rank writes, and no other.
        order: the names of the plain model, in its order.
        group: the ranks that write.
        what: what has failed, in words, if something does.

    Returns:
        The checksums of the files that this rank wrote, by their names.

    Raises:
        CheckpointError: on every rank, when one of them failed.
    """
    writer = dcp.FileSystemWriter(folder)
    summing = _SummingFileSystem()
    writer.fs = summing
    planner = _SavePlanner(tensors, objects, order)
    try:
        with _without_checksums_of_torch():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what} on rank {rank}: {type(cause).__name__}: {cause}") from error
    return summing.checksums


@contextmanager
def _without_checksums_of_torch() -> Iterator[None]:
    """Within, `torch.save` takes none of its own, which nobody would read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _SummingFileSystem(FileSystem):
    """Takes checksums of what is written, and says in an error which file it was."""

    def __init__(self) -> None:
        self.checksums: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with naming(Path(path)), super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summing = Summing(stream)
            yield summing
            self.checksums[Path(path).name] = summing.checksums

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    size: Size
    dtype: torch.dtype


class Folder:
    """A checkpoint folder that was written."""

    def __init__(self, path: str | Path) -> None:
        """Raises DamagedFileError, as every method does: a file is missing or damaged."""
        self.path = Path(path)
        self._files = _CheckingFileSystem(files(self.path))
        with self._naming():
            self._metadata = self._reader().read_metadata()
        self._paths = self._metadata.planner_data or {}

    def tops(self) -> list[str]:
        """The first keys: "model", "optimizer_0", ..."""
        return sorted({str(path[0]) for path, _ in self._below(())})

    def other_states(self) -> list[str]:
        """First keys of further states of the module, such as one before averaging."""
        return [top for top in self.tops() if top != "model" and not re.fullmatch(r"optimizer_\d+", top)]

    def tensors(self, *prefix: str) -> dict[Keys, Stored]:
        """Tensors below a prefix of keys, by what follows it."""
        return {
            path[len(prefix) :]: Stored(tuple(found.size), found.properties.dtype)
            for path, found in self._below(prefix)
            if isinstance(found, TensorStorageMetadata)
        }

    def objects(self, *prefix: str) -> list[Keys]:
        """Values that are no tensors, below a prefix of keys."""
        return [path[len(prefix) :] for path, found in self._below(prefix) if isinstance(found, BytesStorageMetadata)]

    def meta(self, *, weights_only: bool | None) -> dict[str, Any]:
        """Everything that is neither weight nor optimizer."""
        with self._naming(), self._files.create_stream(self.path / META, "rb") as stream:
            return cast(dict[str, Any], torch.load(stream, map_location="cpu", weights_only=weights_only))

    def read(self, tensors: Mapping[Keys, Located], objects: Sequence[Keys] = ()) -> dict[Keys, Any]:
        """Fill the views of what this rank holds; returns the objects.

        Raises:
            ValueError: a tensor is not in the checkpoint, or has another size there.
            DamagedFileError: a file is missing or damaged.
        """
        planner, reader = _LoadPlanner(tensors, objects), self._reader()
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        planner.set_up_planner({}, self._metadata, is_coordinator=True)
        with self._naming():
            reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.found

    def _reader(self) -> dcp.FileSystemReader:
        reader = _Reader(self.path)
        reader.fs = self._files
        return reader

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except DamagedFileError:
            raise
        except _DAMAGE as error:
            raise DamagedFileError(
                f"the checkpoint file {self._files.current} is missing or damaged ({type(error).__name__}: {error}); "
                "load another checkpoint"
            ) from error

    def _below(self, prefix: Keys) -> Iterator[tuple[Keys, Any]]:
        for key, found in self._metadata.state_dict_metadata.items():
            path = tuple(self._paths.get(key, tuple(key.split("."))))
            if path[: len(prefix)] == prefix:
                yield path, found


class _LoadPlanner(LoadPlanner):
    def __init__(self, tensors: Mapping[Keys, Located], objects: Sequence[Keys]) -> None:
        self._tensors = {key_of(path): located for path, located in tensors.items()}
        self._objects = {key_of(path): path for path in objects}
        self.found: dict[Keys, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None, "read before"
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, located in self._tensors.items():
            stored = self._metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != located.size:
                found = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
                raise ValueError(f"the checkpoint has {found} for {key!r}, and the module {located.size}")
            chunks = [ChunkStorageMetadata(torch.Size(r.offset), r.view.size()) for r in located.rectangles]
            items += create_read_items_for_chunk_list(key, stored, chunks)
        for key in self._objects:
            nothing, index = torch.Size((0,)), MetadataIndex(key)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[self._objects[read_item.dest_index.fqn]] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = _view_at(self._tensors[read_item.dest_index.fqn], read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # `resolve_tensor` gave a view of the place where it belongs


class _Reader(dcp.FileSystemReader):
    """Reads tensors to the places where they belong, in the order of the file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        others: list[ReadItem] = []
        files = defaultdict[str, list[ReadItem]](list)
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            is_plain = item.type == LoadItemType.TENSOR and not stored.transform_descriptors
            (files[stored.relative_path] if is_plain else others).append(item)
        for file, items in files.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, file), "rb") as stream:
                for item in sorted(items, key=lambda item: int(self.storage_data[item.storage_index].offset)):
                    part = slice_of(self, stream, self.storage_data[item.storage_index])
                    target = planner.resolve_tensor(item).detach()
                    read_tensor(part, item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        return super().read_data(LoadPlan(others), planner)


class _CheckingFileSystem(FileSystem):
    """Compares what is read with the checksums that are known, and remembers which file was opened last."""

    def __init__(self, known: Sequence[File]) -> None:
        self._known, self.current = {file.path: file for file in known}, Path()
        self._compared: dict[Path, set[int]] = {file.path: set() for file in known}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        self.current = Path(path)
        file = self._known.get(self.current)
        with super().create_stream(path, mode) if file is None else opened(file, self._compared[file.path]) as stream:
            yield stream


def _view_at(located: Located, index: MetadataIndex) -> Tensor:
    assert index.offset is not None, "every rectangle has one"
    offset = tuple(index.offset)
    return next(r.view for r in located.rectangles if r.offset == offset)
