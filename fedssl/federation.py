"""From a recipe to what an engine runs: the data, the clients and the method."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .client import Client
from .data.datasets import Dataset, load_dataset
from .data.digests import Digests, data_digests, differences, read_digests
from .data.files import listed, notify
from .data.partitions import class_counts, deal
from .data.stored_images import rows_in_place
from .errors import UserError
from .evaluation.evaluate import check_downstream, load_downstream
from .guard import GuardOptions
from .messages import Message
from .method import Method
from .models.encoders import build_encoder
from .models.model import Model, copy_entries
from .models.precision import check_precision
from .models.trained_part import freeze
from .models.weights import Weights, digest, keep_batch_statistics, load_weights, read_all_weights
from .randomness import generator_for, seeded
from .recipe.reading import load_stored_recipe
from .recipe.recipe import Recipe
from .recipe.rules import check_data, check_frozen, check_models, check_parts, check_shares
from .run_folder.directory import RunDirectory

MODEL = "model/"
MEMORY = "memory/"


@dataclass(frozen=True)
class Federation:
    """A recipe made ready.

    Attributes:
        client_rows: which training images each client holds, int64 row numbers.
        weights: what encoders start from, by architecture; an architecture that is not in it starts at random.
        downstream: other data that the models are evaluated on, by label.
    """

    recipe: Recipe
    dataset: Dataset
    client_rows: list[Tensor]
    method: Method
    device: torch.device
    weights: Mapping[str, Weights] = field(default_factory=dict)
    downstream: Mapping[str, Dataset] = field(default_factory=dict)

    @property
    def class_counts(self) -> Tensor:
        """Return the images per client and class, int64 [clients, classes]; without labels [clients, 1]."""
        return class_counts(self.dataset.train_labels, self.client_rows, len(self.dataset.counted_as))

    def data_digests(self) -> Digests:
        """Return the digests of all that the run trains and is measured on."""
        return data_digests(self.dataset, self.client_rows, self.downstream)

    def new_model(self, client: int | None) -> Model:
        """Return the model of a client, or the global one (None), as it is before any training."""
        architecture, owner = self.recipe.architecture_of(client or 0), "server" if client is None else client
        return _build_model(self.recipe, self.dataset, self.weights, architecture, owner).to(self.device)

    def client(self, index: int, state: Message, reused: Model | None = None) -> Client:
        """Return a client with its `client_state`; an empty one gives a client that has not taken part yet.

        The state is loaded into `reused`, a model of this client's architecture of which nothing is needed any more,
        which spares building one. A client without a state gets a new model, unless its round takes all from the server
        but a target network, which starts as a copy; in an opening round it takes nothing.

        Raises:
            UserError: entries of the model are missing in the state.
        """
        stored = {k.removeprefix(MODEL): v for k, v in state.tensors.items() if k.startswith(MODEL)}
        own = [] if reused is None else [k for k in self.method.kept_entries(reused) if not k.startswith("target.")]
        opens = self.method.opening_round and not state.numbers
        model = self.new_model(index) if reused is None or ((own or opens) and not stored) else reused
        if state.tensors or state.numbers:
            self._load(model, stored, index)
        memory = {k.removeprefix(MEMORY): v for k, v in state.tensors.items() if k.startswith(MEMORY)}
        rows = self.client_rows[index]
        return Client(
            index,
            rows_in_place(self.dataset.train_images, rows),
            self.dataset.train_labels[rows],
            self.dataset.public_images,
            model,
            Message(memory, dict(state.numbers), dict(state.config)),
        )

    def _load(self, model: Model, stored: dict[str, Tensor], index: int) -> None:
        """Load a client's stored entries; one that the next round needs must not stay at another value."""
        missing = sorted({*self.method.kept_entries(model)} - stored.keys())
        if missing:
            raise UserError(f"the state of client {index} lacks {missing[0]} of its model, which its next round needs")
        own = model.state_dict()
        for name, tensor in stored.items():
            if name not in own:
                raise UserError(f"the state of client {index} holds {name}, which its model does not have")
            if tensor.shape != own[name].shape:
                problem = f"{name} has shape {[*tensor.shape]}, expected {[*own[name].shape]}"
                raise UserError(f"the state of client {index} does not fit its model: {problem}")
        copy_entries(own, stored)

    def client_state(self, client: Client, round_number: int) -> Message:
        """Return what a client's next round needs; after the last one its whole model, for reports and exports."""
        return self.state_in_place(client, round_number).copy()

    def state_in_place(self, client: Client, round_number: int) -> Message:
        """Return `client_state` without copying its tensors: they change as soon as the client's model does."""
        entries = client.model.state_dict()
        kept = entries if round_number == self.recipe.rounds else self.method.kept_entries(client.model)
        tensors = {MODEL + name: entries[name] for name in kept}
        tensors |= {MEMORY + name: tensor for name, tensor in client.memory.tensors.items()}
        return Message(tensors, client.memory.numbers, client.memory.config)

    def sampled_clients(self, round_number: int) -> list[int]:
        """Draw who takes part in a round, without replacement; in ascending order."""
        clients = len(self.client_rows)
        wanted = self.recipe.clients_per_round or clients
        order = torch.randperm(clients, generator=generator_for(self.recipe.seed, "sampling", round_number))
        return sorted(order[:wanted].tolist())

    def answering_clients(self, round_number: int, sampled: list[int]) -> list[int]:
        """Return who of the sampled clients answers; each drops out with probability `client_dropout`."""
        seed, probability = self.recipe.seed, self.recipe.client_dropout
        if not probability:
            return sampled
        draws = {k: torch.rand((), generator=generator_for(seed, "dropout", round_number, k)) for k in sampled}
        return [k for k in sampled if draws[k] >= probability]


def build_federation(
    recipe: Recipe, dataset: Dataset | None = None, owner: int | None = None, trains: bool = True
) -> Federation:
    """Load the data, deal it to the clients and compose the method.

    Where an owner is given, `recipe.data` names the own images of this client: it gets all of them and the others none.
    A federation that only evaluates needs no files that its parts train with.

    Raises:
        UserError: data or weights that cannot be read or do not fit, or parts that do not fit each other.
    """
    check_parts(recipe)
    architectures = [recipe.architecture_of(k) for k in range(recipe.partition.clients)]
    weights = read_all_weights(recipe.model, architectures)
    if weights:
        digests = {architecture: digest(tensors) for architecture, tensors in weights.items()}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"digests": digests})})
    device = device_named(recipe.device)
    check_precision(recipe.training.precision, device)
    images = dataset or load_dataset(recipe.data, recipe.seed)
    if recipe.data.window == "percentiles":
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"window": images.window})})
    check_data(recipe, images)
    shape = tuple(images.train_images.shape[1:])
    if trains:
        regularizers = [regularizer.recorded(shape) for regularizer in recipe.regularizers]
        parts = {"objective": recipe.objective.recorded(shape), "regularizers": regularizers}
        recipe = recipe.model_copy(update=parts)
    if owner is None:
        client_rows = deal(images, recipe.partition, recipe.seed)
    else:
        client_rows = [torch.empty(0, dtype=torch.int64) for _ in architectures]
        client_rows[owner] = torch.arange(len(images.train_labels))
    check_shares(recipe, client_rows, owner)
    model_of = partial(_build_model, recipe, images, weights)
    check_models(recipe, lambda architecture: model_of(architecture, "check"), shape)
    if trains and recipe.model.train != "all":
        for architecture in dict.fromkeys(architectures):
            check_frozen(recipe, architecture, model_of(architecture, "check"), model_of(architecture, "another"))
    downstream = {}
    for label, options in (recipe.evaluation.downstream or {}).items():
        try:
            downstream[label] = load_downstream(options, images.train_images.shape[1:], recipe.seed)
            for architecture in dict.fromkeys(architectures):
                check_downstream(model_of(architecture, "check"), downstream[label], recipe.evaluation)
        except UserError as error:
            raise UserError(f"evaluation.downstream.{label}: {error}") from error
    exchanges = any(aggregator.exchanges_weights for aggregator in recipe.aggregators)
    method = Method(
        objective=recipe.objective,
        regularizers=tuple(recipe.regularizers),
        schedule=recipe.schedule,
        aggregators=tuple(recipe.aggregators),
        local_update=recipe.local_update,
        training=recipe.training,
        augmentation=recipe.objective.training_augmentation(recipe.augmentation),
        rounds=recipe.rounds,
        seed=recipe.seed,
        global_model=model_of(recipe.architecture_of(0), "server").to(device) if exchanges else None,
        public_images=images.public_images,
        guard=_guard_of(recipe),
        transport=recipe.transport,
    )
    return Federation(recipe, images, client_rows, method, device, weights, downstream)


def _guard_of(recipe: Recipe) -> GuardOptions:
    """Return the recipe's guard with the bounds that follow from the partition: some make uneven shares on purpose."""
    guard, partition = recipe.guard, recipe.partition.name
    bounds: dict[str, float] = {}
    if guard.largest_share is None and partition in ("quantity_skew", "column"):
        bounds["largest_share"] = 1.0
    if guard.largest_influence is None:
        bounds["largest_influence"] = 0.5 if partition == "sites" else 1.0
    return guard.model_copy(update=bounds)


def federation_of_run(directory: RunDirectory, trust: bool = False, downstream: bool = False) -> Federation:
    """Return the federation of a run that is evaluated; `downstream` reads the data of `evaluation.downstream` too.

    Its starting weights are read only if a client that keeps a model of its own has not taken part yet. `trust` and
    what is raised are those of `load_stored_recipe`.
    """
    recipe = load_stored_recipe(directory, trust)
    if not recipe.local_update.personal or len(directory.client_rounds) == recipe.partition.clients:
        recipe = recipe.model_copy(update={"model": recipe.model.without_weights()})
    if not downstream:
        evaluation = recipe.evaluation.model_copy(update={"downstream": None})
        recipe = recipe.model_copy(update={"evaluation": evaluation})
    return build_federation(recipe, trains=False)


def require_same_data(folder: Path, digests: Digests) -> None:
    """Raise UserError if data are not those with which the run in a folder began; its folder says which they were."""
    stored = read_digests(folder)
    if stored is None:
        notify(f"{folder} holds no digests of its data, so whether they are still the same cannot be checked")
    elif changed := differences(stored, digests):
        raise UserError(
            f"the data of {folder} have changed since the run began: {listed(list(changed.values()), most=5)}; put the "
            "data back as they were, or start a new run"
        )


def _build_model(
    recipe: Recipe, dataset: Dataset, weights: Mapping[str, Weights], architecture: str, owner: str | int
) -> Model:
    channels, height, width = dataset.train_images.shape[1:]
    with seeded(recipe.seed, "model", owner):
        encoder = build_encoder(architecture, channels, width, height, recipe.model.stem)
        if architecture in weights:
            load_weights(encoder, weights[architecture], architecture, str(recipe.model.source_of(architecture)))
        if recipe.model.keeps_statistics(architecture):
            keep_batch_statistics(encoder)
        frozen = freeze(encoder, recipe.model.train, architecture, (channels, height, width))
        model = recipe.objective.build(recipe.schedule.adapt(encoder), len(dataset.class_names))
    model.frozen = frozenset(f"online.encoder.{name}" for name in frozen)
    model.let_train()
    return model


def device_named(name: str) -> torch.device:
    """Return the device `cpu`, `cuda` or `cuda:N`; `auto` is CUDA if there is a device, else the CPU."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but this torch sees no CUDA device; use device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
