"""What fits together: every rule between a recipe's parts, its data and its models, one after another.

A rule is a function that returns what is wrong and what to do about it, or None. Whether a single value is allowed is
said by the option models themselves; what a part needs of its model is said by the part (`check_model`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..aggregators.base_model import BaseModel
from ..aggregators.weighted_mean import WeightedMean
from ..data.datasets import Dataset
from ..errors import UserError
from ..evaluation.evaluate import check_labels
from ..evaluation.fine_tuning import check_fine_tuning
from ..models.model import Model
from ..models.stages import StagedEncoder
from ..models.view_threads import sharing_problem
from ..parts import part_class, part_names
from .recipe import Recipe

# SecAgg+ counts below 2^32, so that of more clients each would send integers below 2^22, Flower's default
_MOST_CLIENTS = 2**10 - 1


def check_parts(recipe: Recipe) -> None:
    """Check what can be told from the recipe alone (UserError), before any data is loaded."""
    for rule in _RECIPE_RULES:
        if problem := rule(recipe):
            raise UserError(problem)


def check_data(recipe: Recipe, dataset: Dataset) -> None:
    """Check that the data set has what the recipe's parts and its evaluation need (UserError)."""
    check_fine_tuning(recipe.evaluation.fine_tune, dataset)
    if recipe.evaluation.downstream is None:  # else fine-tuning on that data is enough
        check_labels(dataset, recipe.evaluation.semi_supervised, recipe.evaluation.fine_tune)
    if recipe.objective.needs_labels and not dataset.labelled:
        raise UserError(
            f"objective {recipe.objective.name} trains on labels, and the images of data.name={dataset.name} have "
            "none: name a self-supervised objective, or give labels (data.labels for images, y_train and y_test in an "
            ".npz file)"
        )
    users = public_image_users(recipe)
    if users and dataset.public_images is None:
        raise UserError(
            f"{users[0]} needs public images to align on: give data.public_path (an .npz or a folder of images) "
            "or data.public_holdout (that many training images, taken from no client)"
        )


def check_shares(recipe: Recipe, client_rows: list[Tensor], owner: int | None) -> None:
    """Check that each client has enough images for a batch, and no more than secure aggregation counts (UserError).

    Args:
        client_rows: which images each client holds.
        owner: the client whose own images they are; the others then hold none here. None: all are dealt here.
    """
    if owner is None and recipe.partition.name == "sites":
        return  # each site checks its own
    for k, rows in enumerate(client_rows):
        if owner not in (None, k):
            continue
        images = f"{len(rows)} image{'s' if len(rows) != 1 else ''}"
        if len(rows) < recipe.training.batch_size:
            raise UserError(
                f"client {k} has {images}, fewer than training.batch_size {recipe.training.batch_size}: lower the "
                "batch size, or raise partition.min_samples, or use fewer clients"
            )
        secure = recipe.flower.secure_aggregation
        if secure and not recipe.flower.differential_privacy and len(rows) > secure.max_weight:
            # The message leaves a site that is refused, so it does not hold the number.
            raise UserError(
                f"client {k} has more images than flower.secure_aggregation.max_weight {secure.max_weight}: raise it"
            )


def check_models(recipe: Recipe, build: Callable[[str], Model]) -> None:
    """Check each architecture with the parts that work on it (UserError), by building it once.

    Args:
        build: makes the model of an architecture; it refuses an unknown one.
    """
    for name in dict.fromkeys(recipe.architectures):
        model = build(name)
        for part in (*recipe.regularizers, *recipe.aggregators, recipe.local_update):
            part.check_model(model)
        processes = recipe.training.processes
        if processes > 1 and (problem := sharing_problem(model)):
            raise UserError(
                f"training.processes={processes} does not go with architecture {name}, whose {problem}: use another "
                "architecture, or training.processes=1"
            )
        if isinstance(model.encoder, StagedEncoder):
            recipe.schedule.check(model.encoder, recipe.rounds)
    for regularizer in recipe.regularizers:
        regularizer.check_objective(recipe.objective)


def public_image_users(recipe: Recipe) -> list[str]:
    """The parts that work on the shared public images."""
    users = [r.name for r in recipe.regularizers if r.needs_public_images]
    return users + [a.name for a in recipe.aggregators if a.needs_public_images]


# The rules that a recipe alone decides, in the order in which they are checked


def _enough_clients_to_sample(recipe: Recipe) -> str | None:
    clients, sampled = recipe.partition.clients, recipe.clients_per_round
    if sampled is not None and sampled > clients:
        return f"clients_per_round is {sampled}, but partition.clients is only {clients}: lower clients_per_round"
    return None


def _sites_need_flower(recipe: Recipe) -> str | None:
    if recipe.partition.name == "sites" and recipe.engine != "flower":
        return (
            f"partition sites needs engine flower, whose sites bring their own data, got engine {recipe.engine}: "
            "name another partition or engine=flower"
        )
    return None


#: what to do where an engine refuses `clients_parallel`
WITHOUT_CLIENTS_PARALLEL = (
    "leave it out (in a simulation flower.cpus and flower.client_cpus say how many clients train at a time)"
)


def _worker_processes_need_in_process(recipe: Recipe) -> str | None:
    if recipe.clients_parallel > 1 and recipe.engine != "in-process":
        return (
            f"clients_parallel={recipe.clients_parallel} is for engine in-process, got engine {recipe.engine}: "
            f"{WITHOUT_CLIENTS_PARALLEL}"
        )
    return None


def _processes_share_batches(recipe: Recipe) -> str | None:
    """Processes that train one client together give the result of one process only where a batch can be shared."""
    processes, what = recipe.training.processes, f"training.processes={recipe.training.processes}"
    if processes == 1:
        return None
    if recipe.engine != "in-process":
        return f"{what} is for engine in-process, got engine {recipe.engine}: use training.processes=1"
    if recipe.clients_parallel > 1:
        return f"{what} does not go with clients_parallel={recipe.clients_parallel}: leave one of the two at 1"
    if recipe.training.batch_size % processes:
        return (
            f"{what} does not divide training.batch_size {recipe.training.batch_size}, of which each process takes an "
            f"equal share: use a multiple of {processes}"
        )
    if recipe.objective.training_augmentation(recipe.augmentation).uses_global_generators:
        return (
            f"{what} does not go with augmentation {recipe.augmentation.name}, whose views of an image may depend on "
            "the other images of its batch: use random_views, or training.processes=1"
        )
    if not recipe.objective.is_data_parallel():
        known = [name for name in part_names("objectives") if part_class("objectives", name).is_data_parallel()]
        return (
            f"{what} does not go with objective {recipe.objective.name}, whose loss needs the whole batch in one "
            f"process: use {', '.join(known)}, or training.processes=1"
        )
    for regularizer in recipe.regularizers:
        if not regularizer.is_data_parallel():
            return (
                f"{what} does not go with regularizer {regularizer.name}, whose term needs the whole batch in one "
                "process: remove it, or use training.processes=1"
            )
    return None


def _no_data_needs_sites(recipe: Recipe) -> str | None:
    if recipe.data.name != "none":
        return None
    if recipe.partition.name != "sites":
        return (
            f"data.name=none is for a server whose sites bring their own images, got partition {recipe.partition.name}"
            ": use partition.name=sites with engine=flower, or name the data"
        )
    if recipe.objective.needs_labels and not recipe.data.class_names:
        return (
            f"objective {recipe.objective.name} trains on labels, so the server must know the classes: give their "
            "names in order as data.class_names"
        )
    return None


def _enough_clients_to_answer(recipe: Recipe) -> str | None:
    needed, sampled = recipe.guard.minimum_answers, recipe.clients_per_round or recipe.partition.clients
    if needed > sampled:
        return f"guard.minimum_answers is {needed}, but a round asks only {sampled} clients: lower it"
    return None


def _aggregators_allow_the_clients(recipe: Recipe) -> str | None:
    for aggregator in recipe.aggregators:
        aggregator.check(recipe.partition.clients)
    return None


def _readers_have_their_aggregator(recipe: Recipe) -> str | None:
    needed = {regularizer.name: regularizer.needs_aggregator for regularizer in recipe.regularizers}
    needed[recipe.objective.name] = recipe.objective.needs_aggregator
    for reader, aggregator in needed.items():
        if aggregator and aggregator not in _aggregators(recipe):
            return f"{reader} reads what {aggregator} sends: add {{name: {aggregator}}} to aggregators"
    return None


def _each_aggregator_once(recipe: Recipe) -> str | None:
    names = _aggregators(recipe)
    for i, name in enumerate(names):
        if name in names[:i]:
            return f"aggregators name {name} twice, and both would send the same: remove one of the two"
    return None


def _one_joins_the_weights(recipe: Recipe) -> str | None:
    exchanging = [a.name for a in recipe.aggregators if a.exchanges_weights]
    if len(exchanging) > 1:
        return f"aggregators {exchanging[0]} and {exchanging[1]} both join the weights: remove one of the two"
    return None


def _global_model_exists(recipe: Recipe) -> str | None:
    users = [r.name for r in recipe.regularizers if r.needs_global_model]
    users += [a.name for a in recipe.aggregators if a.needs_global_model]
    if users and not _exchanges_weights(recipe):
        return (
            f"{users[0]} works with the global model, but aggregators {_aggregators(recipe)} exchange no weights: add "
            "{name: weighted_mean} with local_update replace, or remove it"
        )
    return None


def _one_architecture_where_weights_travel(recipe: Recipe) -> str | None:
    exchanging = [a.name for a in recipe.aggregators if a.exchanges_weights]
    if exchanging and len({recipe.architecture_of(k) for k in range(recipe.partition.clients)}) > 1:
        return (
            f"architectures {recipe.architectures} differ, but {exchanging[0]} exchanges weights: name one "
            "architecture, or use representation_mean with keep_own"
        )
    return None


def _local_update_fits_the_exchange(recipe: Recipe) -> str | None:
    exchanges = _exchanges_weights(recipe)
    local_update = recipe.local_update
    if exchanges != (local_update.trains_global_copy or not local_update.personal):
        return f"local_update {recipe.local_update.name} does not go with aggregators {_aggregators(recipe)}: " + (
            "use replace" if exchanges else "without exchanged weights use keep_own"
        )
    return None


def _layers_travel_where_they_are_cut(recipe: Recipe) -> str | None:
    if recipe.schedule.cuts and not _exchanges_weights(recipe):
        return (
            f"schedule {recipe.schedule.name} sends layers, but aggregators {_aggregators(recipe)} exchange no "
            "weights: add {name: weighted_mean}, or use end_to_end"
        )
    return None


def _whole_models_where_they_are_compared(recipe: Recipe) -> str | None:
    if recipe.schedule.cuts and recipe.local_update.whole_models:
        return (
            f"local_update {recipe.local_update.name} works with a whole model, but schedule "
            f"{recipe.schedule.name} trains a part of it: use replace, or end_to_end"
        )
    return None


def _no_labels_on_public_images(recipe: Recipe) -> str | None:
    unlabelled = [p.name for p in recipe.regularizers if p.runs_objective]
    unlabelled += [a.name for a in recipe.aggregators if a.trains]
    if recipe.objective.needs_labels and unlabelled:
        return (
            f"objective {recipe.objective.name} trains on labels, but {unlabelled[0]} trains it on public images, "
            "which have none: remove one of the two"
        )
    return None


_RECIPE_RULES = (
    _enough_clients_to_sample,
    _sites_need_flower,
    _worker_processes_need_in_process,
    _processes_share_batches,
    _no_data_needs_sites,
    _enough_clients_to_answer,
    _aggregators_allow_the_clients,
    _readers_have_their_aggregator,
    _each_aggregator_once,
    _one_joins_the_weights,
    _global_model_exists,
    _one_architecture_where_weights_travel,
    _local_update_fits_the_exchange,
    _layers_travel_where_they_are_cut,
    _whole_models_where_they_are_compared,
    _no_labels_on_public_images,
)


def _aggregators(recipe: Recipe) -> list[str]:
    return [aggregator.name for aggregator in recipe.aggregators]


def _exchanges_weights(recipe: Recipe) -> bool:
    return any(aggregator.exchanges_weights for aggregator in recipe.aggregators)


# Flower's differential privacy and secure aggregation


def privacy_problem(recipe: Recipe) -> str | None:
    """Why what a recipe switches on under `flower` cannot work with its other parts; None where it can."""
    options = recipe.flower
    if options.epsilon_budget is not None:
        privacy = options.differential_privacy
        if privacy is None:
            return "flower.epsilon_budget limits what flower.differential_privacy spends, which is off: switch it on"
        if privacy.name == "fixed_clipping" and not privacy.noise_multiplier:
            return (
                "flower.epsilon_budget cannot be kept without noise: raise "
                "flower.differential_privacy.noise_multiplier above 0"
            )
    switched = {"differential_privacy": options.differential_privacy, "secure_aggregation": options.secure_aggregation}
    for key, option in switched.items():
        if option is None:
            continue
        what = f"flower.{key} {option.name}"
        if recipe.engine == "in-process":
            return f"{what} is Flower's: use engine=flower-simulation or engine=flower, or leave it out"
        if recipe.transport != "float32":
            return (
                f"transport {recipe.transport} does not go with {what}: rounding would change an update after it was "
                "clipped and noised, and masked weights travel as integers anyway; use transport=float32, or leave "
                f"flower.{key} out"
            )
        problem = _not_weights_alone(recipe)
        if problem is None and option.name != "local_dp":
            problem = _no_mean(recipe, option.name)
        if problem is None and option.name == "secagg_plus":
            problem = _no_sum(recipe)
        if problem:
            return f"{what} {problem}"
    return None


def _not_weights_alone(recipe: Recipe) -> str | None:
    for i, part in enumerate(recipe.aggregators):
        # compared with what is known to send weights and nothing else, so that a part of one's own is refused
        if type(part).collect is not WeightedMean.collect and type(part) is not BaseModel:
            return (
                f"works on weights, and aggregators.{i} {part.name} has clients send something else, which would leave "
                "them as it is: remove one of the two"
            )
    if not _exchanges_weights(recipe):
        return f"works on exchanged weights, and aggregators {_aggregators(recipe)} exchange none"
    if recipe.local_update.personal:
        return (
            f"works on weights, and with local_update {recipe.local_update.name} clients also send the measures of "
            "their own models, which would leave them as they are: use replace"
        )
    return None


def _no_mean(recipe: Recipe, name: str) -> str | None:
    why = {
        "fixed_clipping": "scales its noise for the clients' mean: use weighted_mean or local_dp",
        "secagg_plus": "gives the server nothing but the clients' mean: use weighted_mean",
    }
    for i, part in enumerate(recipe.aggregators):
        if part.exchanges_weights and type(part).aggregate is not WeightedMean.aggregate:
            return f"does not go with aggregators.{i} {part.name}, which looks at each client's weights; it {why[name]}"
    return None


def _no_sum(recipe: Recipe) -> str | None:
    options = recipe.flower.secure_aggregation
    assert options is not None
    clients = recipe.clients_per_round or recipe.partition.clients
    if not 2 <= clients <= _MOST_CLIENTS:
        return f"needs 2 to {_MOST_CLIENTS} clients a round, there are {clients}"
    if options.num_shares is not None and options.num_shares % 2 == 0:
        return f"needs an odd num_shares, it is {options.num_shares}"
    return None
