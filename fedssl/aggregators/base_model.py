"""FedCA's base model: trained on the public images before the first round and sent to each client once."""

from typing import ClassVar

from pydantic import Field

from ..client import LocalRound
from ..messages import Message
from .base import Aggregator, Shape, Train

BASE = "base_model."
SENT = "base_model.sent."


class BaseModel(Aggregator):
    """The base model of the alignment module of FedCA (Zhang et al. 2023, Federated unsupervised representation
    learning): an encoder trained on public data alone, with which `base_alignment` aligns every client's encoder.

    The server trains it with the recipe's objective, starting from the first global weights. A client receives the
    encoder in its first round and keeps it. Clients send nothing. This follows the paper's abstract, as there is no
    released code; the length of the training is chosen here.
    """

    needs_public_images: ClassVar[bool] = True
    needs_global_model: ClassVar[bool] = True
    trains: ClassVar[bool] = True

    epochs: int = Field(50, ge=1, description="passes over the public images on the server")

    def train_on_public_images(self, local: LocalRound, train: Train) -> Message:
        local.client.model.train()
        train(local, self.epochs)
        model = local.client.model
        entries = model.encoder.state_dict().items()
        return Message({BASE + name: t for name, t in entries if f"online.encoder.{name}" not in model.frozen})

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        base = Message({name: t for name, t in server.tensors.items() if name.startswith(BASE)})
        return {k: Message() if f"{SENT}{k}" in server.numbers else base for k in clients}

    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        return Message()

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        return {}

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return Message(numbers={f"{SENT}{k}": 1 for k in replies})
