"""A run's manifest: its last committed round, and the digests by which a resume knows that the files are unchanged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ..errors import UserError
from ..options import Options
from ..recipe_text import explain_errors, own_part_file, own_parts
from ..storage import digest_of, write_atomically
from ..untrusted.files import read_regular_file
from ..untrusted.strict_yaml import parse_yaml

STATE_FILE = r"(server|client-[0-9]{4,})\.round-[0-9]{5,}\.safetensors"
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Checkpoint(Options):
    """The last committed round, as the manifest holds it."""

    round: int = Field(-1, ge=-1, description="its number; -1 before the first commit")
    files: dict[str, Annotated[str, Field(pattern=f"^{STATE_FILE}$")]] = Field({}, description="state files by owner")
    lengths: dict[Annotated[str, Field(pattern=r"^[a-z]+\.csv$")], Annotated[int, Field(ge=0)]] = Field(
        {}, description="the committed length of the logs in bytes"
    )
    finished: bool = Field(False, description="whether it is the recipe's last round")
    digests: dict[str, _Digest] = Field(
        {}, description="SHA-256 by file name of what a resume relies on; empty in folders of earlier versions"
    )
    parts: dict[str, _Digest] = Field(
        {}, description="SHA-256 of the code of the parts of one's own when the run began, by their name in the recipe"
    )


def first_checkpoint(files: dict[str, str]) -> Checkpoint:
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    recipe = parse_yaml(files["recipe.yaml"], "recipe.yaml")
    sources = {name: own_part_file(name) for name in own_parts(recipe)} if isinstance(recipe, dict) else {}
    parts = {name: digest_of(file) for name, file in sources.items() if file is not None}
    return Checkpoint(digests=digests, parts=parts)


def write_manifest(path: Path, checkpoint: Checkpoint) -> None:
    values = checkpoint.model_dump()
    text = json.dumps(values | {"digest": _digest_of_values(values)}, indent=1)
    write_atomically(path / "checkpoints" / "manifest.json", text.encode())


def read_manifest(path: Path) -> Checkpoint:
    """The manifest of a run's folder; that of a run before its first commit where there is none."""
    file = path / "checkpoints" / "manifest.json"
    try:
        values = json.loads(read_regular_file(file))
        digest = values.pop("digest", None)  # earlier versions wrote none
        if digest is not None and digest != _digest_of_values(values):
            raise ValueError("it was changed or is damaged; put back the file as the run wrote it")
        return Checkpoint.model_validate(values)
    except (FileNotFoundError, NotADirectoryError):
        return Checkpoint()
    except ValidationError as error:
        problems = "; ".join(explain_errors(error, Checkpoint))
        raise UserError(f"{file} cannot be read as a checkpoint: {problems}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a checkpoint: {error}") from error


def _digest_of_values(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
