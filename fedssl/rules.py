"""Which recipes Flower's differential privacy and secure aggregation work with; the others are refused."""

from __future__ import annotations

from .aggregators.base_model import BaseModel
from .aggregators.weighted_mean import WeightedMean
from .recipe import Recipe

# SecAgg+ counts below 2^32, so that of more clients each would send integers below 2^22, Flower's default
_MOST_CLIENTS = 2**10 - 1


def public_image_users(recipe: Recipe) -> list[str]:
    """The parts that work on the shared public images."""
    users = [r.name for r in recipe.regularizers if r.needs_public_images]
    return users + [a.name for a in recipe.aggregators if a.needs_public_images]


def privacy_problem(recipe: Recipe) -> str | None:
    """Why what a recipe switches on under `flower` cannot work with its other parts; None where it can."""
    options = recipe.flower
    switched = {"differential_privacy": options.differential_privacy, "secure_aggregation": options.secure_aggregation}
    for key, option in switched.items():
        if option is None:
            continue
        what = f"flower.{key} {option.name}"
        if recipe.engine == "in-process":
            return f"{what} is Flower's: use engine=flower-simulation or engine=flower, or leave it out"
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
                "them as it is: leave one of the two out"
            )
    if not any(part.exchanges_weights for part in recipe.aggregators):
        return f"works on exchanged weights, and aggregators {[a.name for a in recipe.aggregators]} exchange none"
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
