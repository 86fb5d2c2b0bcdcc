"""FedCA's dictionary: the clients' projections, joined on the server and shared with all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from ..client import LocalRound
from ..data.augmentation import normalize
from ..errors import UserError
from ..messages import Message
from ..models.model import Model
from .base import Aggregator, Shape

DICTIONARY = "dictionary"


def check_projector(part_name: str, model: Model) -> None:
    if "projector" not in model.online:
        raise UserError(f"{part_name} works on projections, and this objective has no projector: use simclr")


class Dictionary(Aggregator):
    """The dictionary module of FedCA (Zhang et al. 2023, Federated unsupervised representation learning).

    Up: the unit projections of `samples` of a client's images after its training, [samples, d] (all of them where it
    has fewer). Down, from the second round on: those of all clients that have answered so far, each client's newest,
    one under the other. `dictionary_contrast` is what uses them.

    From the paper's abstract; there is no released code. How many samples, drawn anew each round, without augmentation
    and in evaluation mode: chosen here. A projection tells something of its image, so unlike weights it is close to
    sharing data.
    """

    samples: int = Field(128, ge=1, description="projections that a client sends")

    def check_model(self, model: Model) -> None:
        check_projector(self.name, model)

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        known = sorted(int(name.split(".")[1]) for name in server.tensors if name.startswith(f"{DICTIONARY}."))
        if not known:
            return {k: Message() for k in clients}
        joined = torch.cat([server.tensors[f"{DICTIONARY}.{k}"] for k in known])
        return dict.fromkeys(clients, Message({DICTIONARY: joined}))

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        client = local.client
        rows = torch.randperm(len(client.images), generator=local.generator("dictionary"))[: self.samples]
        model = client.model.eval()
        batches = [normalize(batch.to(model.device)) for batch in client.images[rows].split(500)]
        projections = torch.cat([model.online["projector"](model.encoder(batch)) for batch in batches])
        return Message({f"{DICTIONARY}.{client.index}": F.normalize(projections, dim=1)})

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        return {f"{DICTIONARY}.{client}": (None, DICTIONARY)}

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return Message({f"{DICTIONARY}.{k}": replies[k].tensors[f"{DICTIONARY}.{k}"] for k in sorted(replies)})
