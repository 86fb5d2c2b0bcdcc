"""From a recipe to what an engine runs: the data, the clients and the method; every inconsistency is refused here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .client import Client
from .data.datasets import Dataset, load_dataset
from .data.partition_table import class_counts
from .data.partitions import partition_indices
from .errors import UserError
from .evaluation.fine_tune import check_fine_tuning
from .messages import Message
from .method import Method
from .models.encoders import build_encoder
from .models.model import Model
from .models.stages import StagedEncoder
from .randomness import generator_for, seeded
from .recipe import Recipe
from .rules import public_image_users

MODEL = "model/"
MEMORY = "memory/"


@dataclass(frozen=True)
class Federation:
    """A recipe made ready.

    Attributes:
        recipe: the recipe.
        dataset: the data set with test and public images.
        client_rows: which training images each client holds, int64 row numbers.
        method: the method object.
        device: where models are trained.
    """

    recipe: Recipe
    dataset: Dataset
    client_rows: list[Tensor]
    method: Method
    device: torch.device

    @property
    def class_counts(self) -> Tensor:
        """Images per client and class, int64 [clients, classes]."""
        return class_counts(self.dataset.train_labels, self.client_rows, len(self.dataset.class_names))

    def architecture(self, client: int) -> str:
        names = self.recipe.architectures
        return names[client % len(names)]

    def new_model(self, client: int | None) -> Model:
        """The model of a client, or the global one (None), as it is before any training."""
        owner = "server" if client is None else client
        with seeded(self.recipe.seed, "model", owner):
            return _build_model(self.recipe, self.dataset, self.architecture(client or 0)).to(self.device)

    def client(self, index: int, state: Message) -> Client:
        """A client with its stored state; an empty state gives the client that has not yet taken part."""
        model = self.new_model(index)
        stored = {k.removeprefix(MODEL): v for k, v in state.tensors.items() if k.startswith(MODEL)}
        if stored:  # whole or an error: a tensor that is missing must not stay at its first value
            model.load_state_dict(stored)
        memory = {k.removeprefix(MEMORY): v for k, v in state.tensors.items() if k.startswith(MEMORY)}
        rows = self.client_rows[index]
        return Client(
            index,
            self.dataset.train_images[rows],
            self.dataset.train_labels[rows],
            self.dataset.public_images,
            model,
            Message(memory, dict(state.numbers), dict(state.config)),
        )

    def client_state(self, client: Client) -> Message:
        """What must be stored of a client: its whole model and its parts' memory."""
        tensors = {MODEL + name: tensor for name, tensor in client.model.state_dict().items()}
        tensors |= {MEMORY + name: tensor for name, tensor in client.memory.tensors.items()}
        return Message(tensors, client.memory.numbers, client.memory.config).copy()

    def sampled_clients(self, round_number: int) -> list[int]:
        """Who takes part in a round, in ascending order; drawn without replacement."""
        clients = len(self.client_rows)
        wanted = self.recipe.clients_per_round or clients
        order = torch.randperm(clients, generator=generator_for(self.recipe.seed, "sampling", round_number))
        return sorted(order[:wanted].tolist())

    def answering_clients(self, round_number: int, sampled: list[int]) -> list[int]:
        """Who of the sampled clients answers; each drops out with probability `client_dropout`, by its own draw."""
        probability = self.recipe.client_dropout
        if not probability:
            return sampled
        seed = self.recipe.seed
        draws = {k: torch.rand((), generator=generator_for(seed, "dropout", round_number, k)) for k in sampled}
        return [k for k in sampled if draws[k] >= probability]


def build_federation(recipe: Recipe, dataset: Dataset | None = None, owner: int | None = None) -> Federation:
    """Load the data, deal it to the clients and compose the method.

    Args:
        recipe: the recipe.
        dataset: is taken in place of the recipe's.
        owner: the client whose own images `recipe.data` names: it gets all of them and the others none. Where not
            given they are dealt by `recipe.partition`.

    Raises:
        UserError: data that cannot be read or dealt as asked, or parts that do not fit each other.
    """
    clients = recipe.partition.clients
    if recipe.clients_per_round is not None and recipe.clients_per_round > clients:
        raise UserError(f"clients_per_round is {recipe.clients_per_round}, partition.clients only {clients}")
    answers = recipe.clients_per_round or clients
    if recipe.partition.name == "sites" and recipe.engine != "flower":
        raise UserError(f"partition sites is for engine flower, whose sites bring their own data, not {recipe.engine}")
    if recipe.guard.minimum_answers > answers:
        raise UserError(f"guard.minimum_answers is {recipe.guard.minimum_answers}, but only {answers} clients answer")
    for aggregator in recipe.aggregators:
        aggregator.check(clients)
    names = [a.name for a in recipe.aggregators]
    needed = {r.name: r.needs_aggregator for r in recipe.regularizers}
    needed[recipe.objective.name] = recipe.objective.needs_aggregator
    for reader, aggregator_name in needed.items():
        if aggregator_name and aggregator_name not in names:
            raise UserError(
                f"{reader} reads what {aggregator_name} sends: add {{name: {aggregator_name}}} to aggregators"
            )
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"aggregators name {name} twice, and both would send the same: leave one of the two out")
    exchanging = [a.name for a in recipe.aggregators if a.exchanges_weights]
    if len(exchanging) > 1:
        raise UserError(
            f"aggregators {exchanging[0]} and {exchanging[1]} both join the weights: leave one of the two out"
        )
    exchanges = bool(exchanging)
    with_global_model = [r.name for r in recipe.regularizers if r.needs_global_model]
    with_global_model += [a.name for a in recipe.aggregators if a.needs_global_model]
    if with_global_model and not exchanges:
        raise UserError(
            f"{with_global_model[0]} works with the global model, but aggregators {names} exchange no weights: add "
            "{name: weighted_mean} with local_update replace, or leave it out"
        )
    if exchanges and len(set(recipe.architectures[:clients])) > 1:
        raise UserError(
            f"architectures {recipe.architectures} differ, but {exchanging[0]} exchanges weights; "
            "name one architecture, or use representation_mean with keep_own"
        )
    if exchanges == recipe.local_update.personal:
        raise UserError(
            f"local_update {recipe.local_update.name} does not go with "
            f"aggregators {names}: " + ("use replace" if exchanges else "without exchanged weights use keep_own")
        )
    if recipe.schedule.cuts and not exchanges:
        raise UserError(
            f"schedule {recipe.schedule.name} sends layers, but aggregators {names} exchange no weights: "
            "add {name: weighted_mean}, or use end_to_end"
        )
    if recipe.schedule.cuts and recipe.local_update.whole_models:
        raise UserError(
            f"local_update {recipe.local_update.name} goes by how far a whole model moves, but schedule "
            f"{recipe.schedule.name} trains a part of it: use replace, or end_to_end"
        )
    unlabelled = [p.name for p in recipe.regularizers if p.runs_objective]
    unlabelled += [a.name for a in recipe.aggregators if a.trains]
    if recipe.objective.needs_labels and unlabelled:
        raise UserError(
            f"objective {recipe.objective.name} trains on labels, but {unlabelled[0]} trains it on public images, "
            "which have none: leave one of the two out"
        )
    device = _device(recipe.device)
    dataset = dataset or load_dataset(recipe.data, recipe.seed)
    check_fine_tuning(recipe.evaluation.fine_tune, dataset)
    public_users = public_image_users(recipe)
    if public_users and dataset.public_images is None:
        raise UserError(
            f"{public_users[0]} needs public images to align on: give data.public_path (an .npz or a folder of images) "
            "or data.public_holdout (that many training images, taken from no client)"
        )
    if owner is None:
        rows = partition_indices(dataset.train_labels, recipe.partition, recipe.seed)
    else:
        rows = [torch.empty(0, dtype=torch.int64) for _ in range(clients)]
        rows[owner] = torch.arange(len(dataset.train_labels))
    for k, mine in enumerate(rows):
        if (owner is None and recipe.partition.name == "sites") or owner not in (None, k):
            continue
        if len(mine) < recipe.training.batch_size:
            raise UserError(
                f"client {k} has {len(mine)} image{'s' if len(mine) != 1 else ''}, fewer than training.batch_size "
                f"{recipe.training.batch_size}: lower the batch size, or raise partition.min_samples, "
                "or use fewer clients"
            )
        secure = recipe.flower.secure_aggregation
        if secure and not recipe.flower.differential_privacy and len(mine) > secure.max_weight:
            # without the number: the line leaves a site that is refused
            raise UserError(
                f"client {k} has more images than flower.secure_aggregation.max_weight {secure.max_weight}: raise it"
            )
    for name in dict.fromkeys(recipe.architectures):  # an unknown one is refused before any training
        with seeded(recipe.seed, "model", "check"):
            model = _build_model(recipe, dataset, name)
        for part in (*recipe.regularizers, *recipe.aggregators, recipe.local_update):
            part.check_model(model)
        if isinstance(model.encoder, StagedEncoder):
            recipe.schedule.check(model.encoder, recipe.rounds)
    for regularizer in recipe.regularizers:
        regularizer.check_objective(recipe.objective)

    def global_model() -> Model:
        with seeded(recipe.seed, "model", "server"):
            return _build_model(recipe, dataset, recipe.architectures[0]).to(device)

    method = Method(
        objective=recipe.objective,
        regularizers=tuple(recipe.regularizers),
        schedule=recipe.schedule,
        aggregators=tuple(recipe.aggregators),
        local_update=recipe.local_update,
        training=recipe.training,
        augmentation=recipe.augmentation,
        rounds=recipe.rounds,
        seed=recipe.seed,
        global_model=global_model() if exchanges else None,
        public_images=dataset.public_images,
        guard=recipe.guard,
    )
    return Federation(recipe, dataset, rows, method, device)


def _build_model(recipe: Recipe, dataset: Dataset, architecture: str) -> Model:
    channels, size = dataset.train_images.shape[1], dataset.train_images.shape[-1]
    encoder = recipe.schedule.adapt(build_encoder(architecture, channels, size))
    return recipe.objective.build(encoder, len(dataset.class_names))


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but this torch sees no CUDA device; use device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
