"""SLURM, as submitit has it."""

from pathlib import Path
from typing import Any

JOB_MINUTES, JOB_CPUS = 24 * 60, 4  # of a job; one that is cut off goes on at the next call


def check() -> None:
    """Refuse where submitit is not installed."""
    try:
        import submitit  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ValueError("--slurm needs submitit, which is not installed: pip install submitit") from error


def executor(partition: str, folder: Path, device: str | None) -> Any:
    """What takes jobs of a partition, with a GPU each where they compute on one; logs go to the folder."""
    import submitit

    made = submitit.AutoExecutor(folder=folder)
    gpus = {"gpus_per_node": 1} if (device or "").startswith("cuda") else {}
    made.update_parameters(
        name="ritz", slurm_partition=partition, timeout_min=JOB_MINUTES, cpus_per_task=JOB_CPUS, **gpus
    )
    return made
