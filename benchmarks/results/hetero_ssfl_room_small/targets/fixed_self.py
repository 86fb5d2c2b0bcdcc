"""Each client's target is, in all rounds, the kernel of the encoder that it trained alone before."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from fedssl.aggregators.representation_mean import RepresentationMean
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.messages import Message


class FrozenSelf(RepresentationMean):
    run: str = Field("", description="run of local training")

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        super().collect(local, travelling)
        public = local.client.public_images
        assert public is not None
        encoder = encoder_of_run(Path(self.run), local.client.index, trust=True).encoder.network
        a, _ = self._factor(torch.cat([encoder(normalize(b)) for b in public.split(500)]))
        return Message({f"representation.{local.client.index}": a})
