"""The base of every typed model that a recipe is validated against."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Frozen, strict about names: an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
