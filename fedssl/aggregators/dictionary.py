"""FedCA's dictionary: the clients' projections, concatenated on the server and sent to all clients."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from ..client import LocalRound
from ..data.pixels import normalize
from ..evaluation.features import images_at_a_time
from ..messages import Message
from .base import OWN_IMAGES, PROJECTION, Aggregator, Shape, fault_of_unit_rows

DICTIONARY = "dictionary"


class Dictionary(Aggregator):
    """The dictionary module of FedCA (Zhang et al. 2023, Federated unsupervised representation learning).

    After its training a client sends the unit projections of its images, [n, d], n all of them or `samples`. From the
    second round on the server sends the newest ones of every client that has answered, as one matrix.

    This follows the paper's abstract, as there is no released code. That all images are projected is read from
    LW-FedSSL (Tun et al. 2024), Table 2: FedCA's traffic is 22.66 GB above FedSimCLR's in 180 rounds, a GB being 1000 *
    2^20 bytes. The projections of COCO's 118,287 images, 256 floats each, down to each of ten clients from round 2 on,
    and a client's own up, make 22.76 GB; those of full batches of 512 alone, 117,760 images, make 22.65 GB. Chosen
    here: which images are sent where `samples` is given (drawn anew in each round), and that they are projected without
    augmentation in evaluation mode. A projection reveals more of its image than weights do: this comes close to sharing
    data. A client with n images sends 4 n d bytes and receives those of all clients. A step compares 2 B projections
    with all of them: 4 * 2 B * sum_k n_k bytes for each matrix of similarities, 50 MB at B = 128 and 50,000 images.
    """

    needs_head: ClassVar[str | None] = "projector"

    samples: int | None = Field(
        None, ge=1, description="projections that a client sends, one of each image (default: those of all its images)"
    )

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        answered = sorted(int(name.split(".")[1]) for name in server.tensors if name.startswith(f"{DICTIONARY}."))
        if not answered:
            return {k: Message() for k in clients}
        joined = torch.cat([server.tensors[f"{DICTIONARY}.{k}"] for k in answered])
        return dict.fromkeys(clients, Message({DICTIONARY: joined}))

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        client = local.client
        rows = torch.randperm(len(client.images), generator=local.generator("dictionary"))[: self.samples]
        model, size = client.model.eval(), images_at_a_time(client.images, 500)
        batches = (normalize(client.images[part].to(model.device)) for part in rows.split(size))
        projections = torch.cat([model.online["projector"](model.encoder(batch)) for batch in batches])
        return Message({f"{DICTIONARY}.{client.index}": F.normalize(projections, dim=1)})

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        rows = OWN_IMAGES if self.samples is None else range(1, self.samples + 1)
        return {f"{DICTIONARY}.{client}": (rows, PROJECTION)}

    def fault(self, client: int, reply: Message) -> str | None:
        return fault_of_unit_rows(reply, f"{DICTIONARY}.{client}")

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        return Message({f"{DICTIONARY}.{k}": replies[k].tensors[f"{DICTIONARY}.{k}"] for k in sorted(replies)})
