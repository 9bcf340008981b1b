"""What went wrong in a world, told as one text: the first failure, then every other rank."""

from tests.spmd_handle import Worker
from tests.spmd_worker import Done, Failed, Job


def report(job: Job, workers: list[Worker], answers: dict[int, Done | Failed]) -> str:
    """Describe a world in which not all ranks are done, and end the workers that have not answered."""
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
    first = min(failures, key=lambda rank: failures[rank].moment, default=None)
    silent = [worker for worker in workers if worker.rank not in answers]
    parts = [_headline(job, first, silent)]
    if first is not None:
        parts.append(failures[first].report)
    stacks = _stacks(silent)
    for rank in range(job.world_size):
        if rank in stacks:
            parts.append(f"--- rank {rank} stood here, innermost call first:\n{stacks[rank]}")
        elif rank in failures and rank != first:
            parts.append(f"--- rank {rank} failed too:\n{failures[rank].report}")
        elif rank != first:
            parts.append(f"--- rank {rank} was through\n")
    return "\n".join(parts).rstrip()


def _headline(job: Job, first: int | None, silent: list[Worker]) -> str:
    body = f"{job.module}.{job.name}"
    if first is not None:
        return f"rank {first} of {job.world_size} failed in {body}:\n"
    ranks = ", ".join(str(worker.rank) for worker in silent)
    return f"of {job.world_size} ranks, {ranks} still in {body} at the limit of {job.timeout:g} s\n"


def _stacks(workers: list[Worker]) -> dict[int, str]:
    for worker in workers:
        worker.ask_for_stacks()
    return {worker.rank: worker.take_stacks() for worker in workers}
