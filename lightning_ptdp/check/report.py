"""The report of a check, as data and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.names import starred

_ROWS = 20  # at most, in the table of differences
_SHOWN = 3  # so many names are listed as they are; more are joined to patterns


@dataclass(frozen=True)
class ParameterReport:
    """The gradient of one parameter in the split step, compared with that of the whole step.

    Attributes:
        name: as in the plain module.
        stages: the stages that own it.
        style: of its module in the tensor-parallel plan; "split" if only the parameter is named there, "" without one.
        difference: the largest of an element, NaN or infinite if the split gradient is.
        size: magnitude of the largest element of the whole step's gradient.
        relative: the difference divided by the size, or, if another parameter's gradient is larger by far, by a small
            part of that one's size.
        is_same: whether `relative` is within the tolerance.
        reason: why it may differ; "" if it does not, or if that was not found out.
    """

    name: str
    stages: tuple[int, ...]
    style: str
    difference: float
    size: float
    relative: float
    is_same: bool
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        module: name of the module's class.
        layout: in words.
        num_rows: rows of the batch.
        num_microbatches: of each replica.
        dtype: of the gradients.
        tolerance: relative; what differs by less is the same.
        faults: why the layout cannot run, all of them; if there are any, nothing was run.
        error: what the split step raised, and where; if it did, there are no parameters.
        loss_whole: loss of the step in one process.
        loss_split: loss of the step under the layout.
        parameters: what was found of each gradient, the worst first.
        reasons: why things differ, as far as was found out.
        notes: remarks on how it was checked.
    """

    module: str
    layout: str
    num_rows: int = 0
    num_microbatches: int = 0
    dtype: str = ""
    tolerance: float = 0.0
    faults: tuple[str, ...] = ()
    error: str = ""
    loss_whole: float = math.nan
    loss_split: float = math.nan
    parameters: tuple[ParameterReport, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_same_loss(self) -> bool:
        """Whether both losses are the same, within the tolerance."""
        return abs(self.loss_split - self.loss_whole) <= self.tolerance * max(abs(self.loss_whole), 1e-3)

    @property
    def different(self) -> tuple[ParameterReport, ...]:
        """The parameters whose gradients differ, the worst first."""
        return tuple(parameter for parameter in self.parameters if not parameter.is_same)

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one process computes."""
        return not self.faults and not self.error and self.has_same_loss and not self.different

    def raise_if_different(self) -> None:
        """Raise the report as an error unless the layout computes what one process computes.

        Raises:
            RuntimeError: the layout cannot run, or does not compute what one process computes.
        """
        if not self.ok:
            raise RuntimeError(str(self))

    def __str__(self) -> str:
        """Write the report as a table for people."""
        lines = [f"check of {self.module}: {self.layout}"]
        if self.faults:
            return "\n".join([*lines, "the layout cannot run:", *_listed(self.faults)])
        pieces = f", {_count(self.num_microbatches, 'microbatch', 'es')} a replica" if self.num_microbatches else ""
        lines.append(
            f"one batch of {_count(self.num_rows, 'row')}{pieces}, in {self.dtype}; the same means within "
            f"{self.tolerance:g}, relative"
        )
        if self.error:
            lines += ["", "the split step fails where the whole one does not:", self.error]
        else:
            lines += ["", self._loss(), *self._gradients()]
        if self.reasons:
            lines += ["", "why it may be:", *(f"[{i}] {text}" for i, text in enumerate(self.reasons, start=1))]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        verdict = "computes" if self.ok else "does NOT compute"
        return "\n".join([*lines, "", f"This layout {verdict} what one process computes."])

    def _loss(self) -> str:
        difference = abs(self.loss_split - self.loss_whole)
        return f"loss: {self.loss_whole:.10g} whole, {self.loss_split:.10g} split, difference {difference:.1e}"

    def _gradients(self) -> list[str]:
        different = self.different
        same = [parameter for parameter in self.parameters if parameter.is_same]
        lines = [f"gradients: {len(same)} of {len(self.parameters)} parameters the same"]
        if same:
            lines[0] += f"; of these the largest difference is {same[0].relative:.1e}, relative, of {same[0].name}"
        if different:
            cells: list[tuple[str, ...]] = [("differs", "stage", "style", "difference", "relative", "why")]
            cells += [self._cells(parameter) for parameter in different[:_ROWS]]
            lines += ["", *_table(cells)]
        if len(different) > _ROWS:
            lines.append(f"and {len(different) - _ROWS} more")
        return lines

    def _cells(self, parameter: ParameterReport) -> tuple[str, ...]:
        why = f"[{self.reasons.index(parameter.reason) + 1}]" if parameter.reason in self.reasons else ""
        stages = ",".join(map(str, parameter.stages))
        numbers = f"{parameter.difference:.1e}", f"{parameter.relative:.1e}"
        return parameter.name, stages, parameter.style or "-", *numbers, why


def patterns(names: Sequence[str]) -> str:
    """Write dotted names in short: those that differ in a number become one pattern, with a star."""
    if len(names) <= _SHOWN:
        return ", ".join(map(repr, names))
    stars = [starred(name) for name in names]
    shown = [name if stars.count(star) == 1 else star for name, star in zip(names, stars, strict=True)]
    return ", ".join(map(repr, dict.fromkeys(shown)))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _listed(texts: Sequence[str]) -> list[str]:
    return [f"- {text}" for text in texts]


def _count(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else ending}"
