"""The training step at which a run stopped because its loss was not finite: failed_step.json in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, ValidationError

from ..errors import UserError
from ..options import Options, explain_errors
from ..untrusted import MOST_BYTES, printable, read_regular_file
from .storage import write_atomically

FAILED_STEP = "failed_step.json"


class FailedStep(Options):
    """A training step. What it started from is the last commit of the run's folder, see engines/replay.py."""

    client: int = Field(ge=0)
    round: int = Field(ge=1)
    step: int = Field(ge=1, description="within the client's round")
    loss: str = Field(description="nan, inf or -inf")
    rows: list[int] = Field(description="numbers of the batch's images among the client's, from 0")


def write_failed_step(folder: Path, failed: FailedStep) -> None:
    """Leave a step in a run's folder; one that is there already is replaced."""
    write_atomically(folder / FAILED_STEP, (json.dumps(failed.model_dump()) + "\n").encode())


def read_failed_step(folder: Path) -> FailedStep:
    """Return the step in a run's folder; raise UserError if there is none or it cannot be read."""
    file = folder / FAILED_STEP
    try:
        return FailedStep.model_validate(json.loads(read_regular_file(file, MOST_BYTES)))
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no {FAILED_STEP}, so there is no step to replay: a run of engine in-process leaves one "
            "when a client's loss becomes NaN or infinite"
        ) from None
    except ValidationError as error:
        raise UserError(f"{file} cannot be read: {'; '.join(explain_errors(error, FailedStep))}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {printable(str(error))}") from error
