"""A client while it works on one round."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkernels import ViewKey

from .augmentations.base import Augmentation, draw_views
from .data.stored_images import Images
from .messages import Message
from .models.model import Model
from .objectives.base import Objective
from .randomness import generator_for, seed_for


@dataclass
class Client:
    """One client with its data and its model.

    Attributes:
        index: from 0.
        images: its private training images, uint8 [n, C, H, W], by row: `images[rows]` copies or reads a batch of them.
        labels: their labels, int64 [n]; only a supervised objective reads them. All are 0 where there are none.
        public_images: the representation alignment data that all clients share, uint8 [L, C, H, W].
        memory: what its parts keep between rounds (FedEMA's lambda, a whitening matrix). The engine stores it.
    """

    index: int
    images: Images
    labels: Tensor
    public_images: Tensor | None
    model: Model
    memory: Message = field(default_factory=Message)


@dataclass
class LocalRound:
    """One client's work on one round, as parts see it.

    Attributes:
        received: the server's message of this round.
        number: the round, from 1 (0 is the opening round, in which nothing is trained).
        seed: the run's.
        previous: the client's online network as it was before it received anything in this round, by state-dict name;
            only where a regulariser asks for it (`needs_previous_model`).
    """

    client: Client
    received: Message
    number: int
    seed: int
    objective: Objective
    augmentation: Augmentation
    previous: dict[str, Tensor] | None = None
    _logged: dict[str, list[float | Tensor]] = field(default_factory=lambda: defaultdict(list))

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return this round's generator for a purpose."""
        return generator_for(self.seed, "client", self.client.index, "round", self.number, purpose, device=device)

    def views(
        self, images: Tensor, samples: Tensor, purpose: str, epoch: int = 0, count: int = 2
    ) -> tuple[Tensor, ...]:
        """Draw random views of a batch, `count` normalised float32 [n, C, H, W], on the model's device.

        Args:
            images: uint8 [n, C, H, W].
            samples: int64 [n] on the CPU, the images' numbers in their data set, such as their rows in `client.images`.
            purpose: another purpose gets other views of the same images.
            epoch: how often the client has gone through the images before in this round, for this purpose.
        """
        number = self.client.index % 2**32  # the server's number is -1
        key = ViewKey(seed_for(self.seed, "views", purpose), number, self.number, epoch)
        return draw_views(self.augmentation, images, samples, key, self.client.model.device, count)

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a number, or a scalar tensor, which is read only when the round is over; metrics are means over steps."""
        self._logged[name].append(value.detach() if isinstance(value, Tensor) and value.requires_grad else value)

    def logged(self) -> dict[str, float]:
        """Return the mean of what was logged by each name."""
        return {name: sum(map(float, values)) / len(values) for name, values in self._logged.items()}
