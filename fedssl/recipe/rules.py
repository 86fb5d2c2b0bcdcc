"""Rules between a recipe's parts, its data and its models, one after another.

A message names what does not go together and what to do about it. The option models themselves check single values, and
a part checks what it needs of its model (`check_model`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..aggregators.base_model import BaseModel
from ..aggregators.weighted_mean import WeightedMean
from ..data.datasets import Dataset
from ..errors import SendableError, UserError, explained
from ..evaluation.evaluate import check_evaluation
from ..models.model import Model
from ..models.stages import StagedEncoder
from ..parts import is_session_part
from .recipe import FixedClipping, LocalDP, Recipe, SecAggPlus

# SecAgg+ counts below 2^32, so that of more clients each would send integers below 2^22, Flower's default
_MOST_CLIENTS = 2**10 - 1


def check_parts(recipe: Recipe) -> None:
    """Raise a UserError for the first rule that the recipe alone breaks, before any data is loaded."""
    for rules in (_rules_of_processes, _rules_of_data, _rules_of_aggregators, _rules_of_training, rules_of_privacy):
        for problem in rules(recipe):
            raise UserError(problem)


def check_data(recipe: Recipe, dataset: Dataset) -> None:
    """Raise a UserError if the data set lacks what the recipe's parts or its evaluation need."""
    recipe.objective.training_augmentation(recipe.augmentation).check_channels(dataset.train_images.shape[1])
    # with other data fine-tuning on those is enough
    check_evaluation(dataset, recipe.evaluation, needs_labels=recipe.evaluation.downstream is None)
    if recipe.objective.needs_labels and not dataset.labelled:
        raise UserError(
            f"objective {recipe.objective.name} trains on labels, and the images of data.name={dataset.name} have "
            "none: name a self-supervised objective, or give labels (data.labels for images, y_train and y_test in an "
            ".npz file)"
        )
    public = 0 if dataset.public_images is None else len(dataset.public_images)
    if (users := public_image_users(recipe)) and public < 2:  # BatchNorm has no variance of one
        raise UserError(
            f"{users[0]} needs public images, at least two: give data.public_path (an .npz or a folder of images) "
            "or data.public_holdout (that many training images, taken from no client)"
        )


def check_shares(recipe: Recipe, client_rows: list[Tensor], owner: int | None) -> None:
    """Raise a UserError if a client has too few images for a batch, or more than secure aggregation counts.

    `client_rows` are the row numbers of each client's images. With an `owner`, whose own images they are, the others
    hold none here.
    """
    if owner is None and recipe.partition.name == "sites":
        return  # each site checks its own
    for k, rows in enumerate(client_rows):
        if owner not in (None, k):
            continue
        images = f"{len(rows)} image{'s' if len(rows) != 1 else ''}"
        size = recipe.training.batch_size
        if owner is not None and len(rows) < size:
            # The messages leave a site that is refused, so they do not hold its number.
            raise SendableError(
                f"the site has fewer training images than training.batch_size {size}, which holds for all sites: give "
                f"it at least {size}, or ask the server's operator for a smaller training.batch_size"
            )
        if len(rows) < size:
            raise UserError(
                f"client {k} has {images}, fewer than training.batch_size {size}: lower the "
                "batch size, or raise partition.min_samples, or use fewer clients"
            )
        secure = recipe.flower.secure_aggregation
        if secure and not recipe.flower.differential_privacy and len(rows) > secure.max_weight:
            raise SendableError(
                f"client {k} has more images than flower.secure_aggregation.max_weight {secure.max_weight}: raise it"
            )


def check_models(recipe: Recipe, build: Callable[[str], Model], shape: tuple[int, ...]) -> None:
    """Build each architecture once, and raise a UserError if a part cannot work with it or `build` does not know it.

    `shape` is that of the training images, [C, H, W].
    """
    for name in dict.fromkeys(recipe.architectures):
        model = build(name)
        for part in (*recipe.regularizers, *recipe.aggregators, recipe.local_update):
            if part.needs_head is not None and part.needs_head not in model.online:
                raise UserError(
                    f"{part.name} works on the {part.needs_head}'s outputs, but objective {recipe.objective.name} has "
                    f"no {part.needs_head}: use {'simclr' if part.needs_head == 'projector' else 'byol or simsiam'}"
                )
            part.check_model(model)
        if isinstance(model.encoder, StagedEncoder):
            recipe.schedule.check(model.encoder, recipe.rounds)
        further = recipe.augmentation.further_shape(shape)
        if recipe.objective.views > 2 and further != shape:
            _check_further_views(model, further, name)
    objective = recipe.objective
    for regularizer in recipe.regularizers:
        if regularizer.needs_two_views and objective.online_views != 2:
            raise UserError(
                f"{regularizer.name} compares two views of each image, but objective {objective.name} passes "
                f"{objective.online_views} through the online network: use simclr, or byol with symmetric: true"
            )
        own = [name for name, _ in model.named_buffers(recurse=False)]
        if regularizer.runs_objective and (objective.views != 2 or own):
            why = f"needs {objective.views}" if objective.views != 2 else f"keeps a {own[0]} of the client's own images"
            raise UserError(
                f"{regularizer.name} takes steps on two views of the public images, but objective {objective.name} "
                f"{why}: use byol, simsiam, simclr or moco_v3"
            )


def check_frozen(recipe: Recipe, architecture: str, one: Model, another: Model) -> None:
    """Raise a UserError if two clients' models, built alike, would be frozen at different values: at random ones."""
    values, others = one.state_dict(), another.state_dict()
    for name in sorted(one.frozen):
        if not torch.equal(values[name], others[name]):
            raise UserError(
                f"model.train={recipe.model.train} leaves {name.removeprefix('online.encoder.')} of {architecture} as "
                "it starts, which is at random: give model.weights that hold it (for a stem of 7x7 with "
                "model.stem=large), or leave model.train out"
            )


def _check_further_views(model: Model, shape: tuple[int, ...], architecture: str) -> None:
    views = f"further views of {shape[1]}x{shape[2]} pixels that the augmentation makes"
    advice = "change augmentation.local_side, or use augmentation.name=random_views or a convolutional network such as"
    with (
        torch.no_grad(),
        explained(f"architecture {architecture} does not take the {views}", f": {advice} small_resnet18"),
    ):
        model.encoder.eval()(torch.zeros(2, *shape))


def public_image_users(recipe: Recipe) -> list[str]:
    """Return the names of the parts that work on the shared public images."""
    users = [regularizer.name for regularizer in recipe.regularizers if regularizer.needs_public_images]
    return users + [aggregator.name for aggregator in recipe.aggregators if aggregator.needs_public_images]


# The following functions yield problems in the order in which they are checked. Only the first one is reported, so a
# rule may rely on the rules before it.


def _rules_of_processes(recipe: Recipe) -> Iterator[str]:
    """Yield problems with the engine and with the clients that train at a time."""
    clients, sampled, parallel = recipe.partition.clients, recipe.clients_per_round, recipe.clients_parallel
    if sampled is not None and sampled > clients:
        yield f"clients_per_round is {sampled}, but partition.clients is only {clients}: lower clients_per_round"
    if recipe.partition.name == "sites" and recipe.engine != "flower":
        yield (
            f"partition sites needs engine flower, whose sites bring their own data, got engine {recipe.engine}: "
            "name another partition or engine=flower"
        )
    parts = [recipe.objective, recipe.augmentation, *recipe.regularizers, recipe.schedule, *recipe.aggregators]
    session_parts = [part.name for part in (*parts, recipe.local_update) if is_session_part(part.name)]
    if session_parts and (recipe.engine != "in-process" or parallel > 1):
        yield (
            f"the class {session_parts[0].partition(':')[2]} was defined in a notebook or a script, which other "
            "processes cannot import: put it into a file, for instance my_part.py, and import it from there, or use "
            "engine=in-process and clients_parallel=1 (docs/compose_in_python.md)"
        )
    if parallel > 1 and recipe.engine != "in-process":
        yield (f"clients_parallel={parallel} is for engine in-process, got engine {recipe.engine}: leave it out")


def _rules_of_data(recipe: Recipe) -> Iterator[str]:
    """Yield problems with a server without data, and with the number of clients."""
    if recipe.data.name == "none" and recipe.partition.name != "sites":
        yield (
            f"data.name=none is for a server whose sites bring their own images, got partition {recipe.partition.name}"
            ": use partition.name=sites with engine=flower, or name the data"
        )
    if recipe.data.name == "none" and recipe.objective.needs_labels and not recipe.data.class_names:
        yield (
            f"objective {recipe.objective.name} trains on labels, so the server must know the classes: give their "
            "names in order as data.class_names"
        )
    needed, sampled = recipe.guard.minimum_answers, recipe.clients_per_round or recipe.partition.clients
    if needed > sampled:
        yield f"guard.minimum_answers is {needed}, but a round asks only {sampled} clients: lower it"
    for aggregator in recipe.aggregators:
        aggregator.check(recipe.partition.clients)


def _rules_of_aggregators(recipe: Recipe) -> Iterator[str]:
    """Yield problems with what the clients send, and with the parts that read it."""
    names = [aggregator.name for aggregator in recipe.aggregators]
    needs = [(regularizer.name, regularizer.needs_aggregator) for regularizer in recipe.regularizers]
    for reader, needed in (*needs, (recipe.objective.name, recipe.objective.needs_aggregator)):
        if needed and needed not in names:
            yield f"{reader} reads what {needed} sends: add {{name: {needed}}} to aggregators"
    for i, name in enumerate(names):
        if name in names[:i]:
            yield f"aggregators name {name} twice, and both would send the same: remove one of the two"
    encoders = [(part.name, "oracle", getattr(part, "oracle", None)) for part in recipe.aggregators]
    encoders += [(p.name, "teacher", getattr(p, "teacher", None)) for p in (recipe.objective, *recipe.regularizers)]
    for name, option, source in encoders:
        if recipe.engine == "flower" and source is not None and not source.startswith("timm:"):
            yield (
                f"{name}.{option} is a folder of this machine, which engine flower's sites lack: use timm:NAME, "
                "whose weights each site fetches itself, or in-process"
            )
    exchanging = [aggregator.name for aggregator in recipe.aggregators if aggregator.exchanges_weights]
    if len(exchanging) > 1:
        yield f"aggregators {exchanging[0]} and {exchanging[1]} both join the weights: remove one of the two"
    users = [regularizer.name for regularizer in recipe.regularizers if regularizer.needs_global_model]
    users += [aggregator.name for aggregator in recipe.aggregators if aggregator.needs_global_model]
    if users and not exchanging:
        yield (
            f"{users[0]} works with the global model, but aggregators {names} exchange no weights: add "
            "{name: weighted_mean} with local_update replace, or remove it"
        )
    if exchanging and len({recipe.architecture_of(k) for k in range(recipe.partition.clients)}) > 1:
        yield (
            f"architectures {recipe.architectures} differ, but {exchanging[0]} exchanges weights: name one "
            "architecture, or use representation_mean with keep_own"
        )
    local_update = recipe.local_update
    if bool(exchanging) != (local_update.trains_global_copy or not local_update.personal):
        yield f"local_update {local_update.name} does not go with aggregators {names}: " + (
            "use replace" if exchanging else "without exchanged weights use keep_own"
        )
    if recipe.schedule.cuts and not exchanging:
        yield (
            f"schedule {recipe.schedule.name} sends layers, but aggregators {names} exchange no weights: add "
            "{name: weighted_mean}, or use end_to_end"
        )


def _rules_of_training(recipe: Recipe) -> Iterator[str]:
    """Yield problems with the schedule's layers and with the objective on public images."""
    if recipe.schedule.cuts and recipe.local_update.whole_models:
        yield (
            f"local_update {recipe.local_update.name} works with a whole model, but schedule "
            f"{recipe.schedule.name} trains a part of it: use replace, or end_to_end"
        )
    if recipe.schedule.cuts and recipe.model.train != "all":
        yield (
            f"schedule {recipe.schedule.name} says itself which layers train, so model.train={recipe.model.train} does "
            "not go with it: leave one of the two out"
        )
    unlabelled = [regularizer.name for regularizer in recipe.regularizers if regularizer.runs_objective]
    unlabelled += [aggregator.name for aggregator in recipe.aggregators if aggregator.trains]
    if recipe.objective.needs_labels and unlabelled:
        yield (
            f"objective {recipe.objective.name} trains on labels, but {unlabelled[0]} trains it on public images, "
            "which have none: remove one of the two"
        )


def rules_of_privacy(recipe: Recipe) -> Iterator[str]:
    """Yield problems of Flower's differential privacy and secure aggregation, which `parse_recipe` asks for, too."""
    options = recipe.flower
    privacy = options.differential_privacy
    if options.epsilon_budget is not None:
        if privacy is None:
            yield "flower.epsilon_budget limits what flower.differential_privacy spends, which is off: switch it on"
        if isinstance(privacy, FixedClipping) and not privacy.noise_multiplier:
            yield (
                "flower.epsilon_budget cannot be kept without noise: raise "
                "flower.differential_privacy.noise_multiplier above 0"
            )
    methods = {"differential_privacy": privacy, "secure_aggregation": options.secure_aggregation}
    for key, method in methods.items():
        if method is None:
            continue
        option = f"flower.{key} {method.name}"
        if recipe.engine == "in-process":
            yield f"{option} is Flower's: use engine=flower-simulation or engine=flower, or leave it out"
        if recipe.transport != "float32":
            yield (
                f"transport {recipe.transport} does not go with {option}: rounding would change an update after it was "
                "clipped and noised, and masked weights travel as integers anyway; use transport=float32, or leave "
                f"flower.{key} out"
            )
        yield from (f"{option} {problem}" for problem in _rules_of_method(recipe, method))


def _rules_of_method(recipe: Recipe, method: LocalDP | FixedClipping | SecAggPlus) -> Iterator[str]:
    """Yield problems of a privacy method with the aggregators and clients, without the method's name."""
    for i, part in enumerate(recipe.aggregators):
        # compared with the parts that are known to send weights and nothing else, so that a custom part is refused
        if type(part).collect is not WeightedMean.collect and type(part) is not BaseModel:
            yield (
                f"works on weights, and aggregators.{i} {part.name} chooses itself what clients send, "
                "of which anything but weights would leave as it is: remove one of the two"
            )
    if not any(part.exchanges_weights for part in recipe.aggregators):
        yield f"works on exchanged weights, and aggregators {[part.name for part in recipe.aggregators]} exchange none"
    if recipe.local_update.personal:
        yield (
            f"works on weights, and with local_update {recipe.local_update.name} clients also send the measures of "
            "their own models, which would leave them as they are: use replace"
        )
    if isinstance(method, LocalDP):
        return
    reason = "scales its noise for the clients' mean: use weighted_mean or local_dp"
    if isinstance(method, SecAggPlus):
        reason = "gives the server nothing but the clients' mean: use weighted_mean"
    for i, part in enumerate(recipe.aggregators):
        if part.exchanges_weights and type(part).aggregate is not WeightedMean.aggregate:
            yield f"does not go with aggregators.{i} {part.name}, which looks at each client's weights; it {reason}"
    if isinstance(method, SecAggPlus):
        clients = recipe.clients_per_round or recipe.partition.clients
        if not 2 <= clients <= _MOST_CLIENTS:
            yield f"needs 2 to {_MOST_CLIENTS} clients a round, there are {clients}"
        if method.num_shares is not None and method.num_shares % 2 == 0:
            yield f"needs an odd num_shares, it is {method.num_shares}"
