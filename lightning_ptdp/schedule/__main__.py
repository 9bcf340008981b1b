"""Shows a schedule: `python -m lightning_ptdp.schedule interleaved -p 4 -m 8 -v 2 --form svg > interleaved.svg`."""

import argparse
import sys
from collections.abc import Sequence

from lightning_ptdp.schedule import SCHEDULES, generate, lower, show, svg, text


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a schedule to standard output; the arguments are those of the command line if None."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ptdp.schedule", description="Show a pipeline schedule.")
    parser.add_argument("schedule", choices=(*SCHEDULES, "forward_only"))
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, required=True)
    parser.add_argument("-m", "--num-microbatches", type=int, required=True)
    parser.add_argument("-v", "--virtual-pipeline-size", type=int, default=1)
    parser.add_argument(
        "--form",
        choices=("text", "svg", "actions", "lowered"),
        default="text",
        help="a drawing in text or SVG, or the actions of each rank, without or with messages",
    )
    given = parser.parse_args(arguments)
    try:
        program = generate(
            given.schedule,
            pipeline_parallel_size=given.pipeline_parallel_size,
            num_microbatches=given.num_microbatches,
            virtual_pipeline_size=given.virtual_pipeline_size,
        )
    except ValueError as error:
        parser.error(str(error))
    match given.form:
        case "svg":
            sys.stdout.write(svg(program, name=given.schedule))
        case "text":
            sys.stdout.write(text(program) + "\n")
        case "actions":
            sys.stdout.write("\n".join(show(program)) + "\n")
        case "lowered":
            sys.stdout.write("\n".join(show(lower(program))) + "\n")


if __name__ == "__main__":
    main()
