"""A run of plain functions, as a stage asks for it."""

from dataclasses import dataclass, field


@dataclass
class PlainRun:
    """step: called with the stage and the microbatch. events: what was told."""

    step: object
    events: list = field(default_factory=list)

    def call(self, stage, microbatch, *, is_whole):
        return self.step(stage, microbatch)

    def enter_stage(self, stage):
        self.events.append(f"stage {stage} starts")

    def after_blocks(self):
        self.events.append("blocks are through")

    def take(self, microbatch, result):
        return result

    def backward(self, loss):
        loss.backward()
