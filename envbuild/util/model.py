"""The base of every model of a data file."""

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Base of every data-file model: immutable, and an unknown key is an error."""

    # deferred: a command validates by a few of the models, and need not wait for the validators of all
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


class NoFacts(Model):
    """What a release states of itself where its axis asks for nothing."""
