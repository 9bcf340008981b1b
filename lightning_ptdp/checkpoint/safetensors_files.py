"""Weights in safetensors files, of which a rank reads the parts that it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_ptdp.checkpoint.rectangles import Located

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_safetensors(path: str | Path) -> bool:
    """Whether this is a safetensors file, or a folder of them as Hugging Face writes it."""
    where = Path(path)
    if where.is_dir():
        return (where / FILE).is_file() or (where / INDEX).is_file()
    return where.suffix == ".safetensors" and where.is_file()


class SafetensorsFiles:
    """The tensors of one file, or of a folder of them."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            ImportError: safetensors is not installed.
            RuntimeError: the file or the index cannot be read.
        """
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(f"reading {path} needs safetensors; pip install 'lightning_ptdp[hf]'") from error
        self._open, self._error = safe_open, SafetensorError
        self.file_of = self._files(Path(path))
        """The file that each tensor lies in, by name."""

    def _files(self, path: Path) -> dict[str, Path]:
        index = path / INDEX
        try:
            if index.is_file():
                listed = json.loads(index.read_text())["weight_map"]
                return {name: path / file for name, file in listed.items()}
            file = path / FILE if path.is_dir() else path
            with self._open(str(file), framework="pt") as stream:
                return dict.fromkeys(stream.keys(), file)
        except (OSError, ValueError, KeyError, self._error) as error:
            raise RuntimeError(f"the weights in {path} cannot be read ({type(error).__name__}: {error})") from error

    def read(self, wanted: Sequence[tuple[str, Located]]) -> int:
        """Fill the views of what this rank holds of tensors, by their names; returns the bytes that were read.

        Raises:
            ValueError: a tensor has another size.
            RuntimeError: a file is missing or damaged.
        """
        by_file: dict[Path, list[tuple[str, Located]]] = {}
        for name, located in wanted:
            by_file.setdefault(self.file_of[name], []).append((name, located))
        return sum(self._read(file, tensors) for file, tensors in by_file.items())

    def _read(self, file: Path, wanted: Sequence[tuple[str, Located]]) -> int:
        num_bytes = 0
        try:
            with self._open(str(file), framework="pt") as stream:
                for name, located in wanted:
                    stored = stream.get_slice(name)
                    if tuple(stored.get_shape()) != located.size:
                        raise ValueError(
                            f"{name!r} has the size {tuple(stored.get_shape())} in {file}, and {located.size} in the "
                            "module; build the module with the configuration of these weights"
                        )
                    for rectangle in located.rectangles:
                        box = tuple(
                            slice(start, start + length)
                            for start, length in zip(rectangle.offset, rectangle.view.shape, strict=True)
                        )
                        values = stored[box] if box else stream.get_tensor(name)
                        rectangle.view.copy_(values)
                        num_bytes += values.numel() * values.element_size()
        except (OSError, self._error) as error:
            raise RuntimeError(
                f"the file {file} is missing or damaged ({type(error).__name__}: {error}); fetch it again"
            ) from error
        return num_bytes
