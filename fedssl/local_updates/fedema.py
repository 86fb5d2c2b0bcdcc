"""FedEMA: mix the global model into the client's own; the less local training moved it, the larger the global share."""

from typing import ClassVar

import torch
from pydantic import Field

from ..client import LocalRound
from .base import AfterTraining, LocalUpdate
from .fedu import divergence, encoder_weights
from .replace import Replace

DIVERGENCE = "fedema.divergence"
LAMBDA = "fedema.lambda"
LAST_ROUND = "fedema.last_round"


class FedEMA(LocalUpdate):
    """Divergence-aware exponential moving average update (Zhuang et al. 2022, Divergence-aware Federated
    Self-Supervised Learning).

        online = mu * own + (1 - mu) * global,  mu = min(1, lambda_k * divergence_k),  lambda_k = tau / divergence_k

    This applies to the parameters of encoder, projector and predictor. lambda_k is set once, after client k's first
    local training, so that its first mu is tau; it stays in the client's memory. A client takes the global model in its
    first round, and also when it was not in the previous round (the released code's `selective_ema`); its target
    network then starts again as a copy of it.

    This follows the authors' released code (EasyFL, applications/fedssl): divergence_k is that of the client's previous
    local training (see FedU). The paper's text takes the distance of the received global model from the client's own.
    tau is the paper's 0.7; the code's default is 0.8. BatchNorm's running statistics are the received ones, as a moving
    average is defined for parameters. The code does the same for the encoder, and takes the predictor's from the side
    with the larger share. A client whose training moved nothing has no lambda yet and takes the global model. Logs
    `divergence`, `mu` (0 where the global model was taken) and `lambda`.
    """

    whole_models: ClassVar[bool] = True
    needs_head: ClassVar[str | None] = "predictor"

    tau: float = Field(0.7, gt=0, le=1, description="share of the client's own weights in its first mixture")

    def receive(self, local: LocalRound) -> AfterTraining:
        model, numbers = local.client.model, local.client.memory.numbers
        mixes = LAMBDA in numbers and numbers[LAST_ROUND] == local.number - 1
        mu = min(1.0, numbers[LAMBDA] * numbers[DIVERGENCE]) if mixes else 0.0
        own = {name: p.detach().clone() for name, p in model.online.named_parameters()}
        Replace().receive(local)
        if mixes:
            with torch.no_grad():
                for name, parameter in model.online.named_parameters():
                    if f"online.{name}" in local.received.tensors:
                        parameter.lerp_(own[name], mu)
        elif LAST_ROUND in numbers:
            model.reset_target()
        local.log("mu", mu)
        before = encoder_weights(model)

        def after_training() -> None:
            numbers[DIVERGENCE] = moved = divergence(before, encoder_weights(model))
            numbers[LAST_ROUND] = local.number
            if LAMBDA not in numbers and moved > 0:
                numbers[LAMBDA] = self.tau / moved
            local.log("divergence", moved)
            if LAMBDA in numbers:
                local.log("lambda", numbers[LAMBDA])

        return after_training
