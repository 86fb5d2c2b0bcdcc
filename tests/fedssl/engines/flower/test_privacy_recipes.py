"""Which recipes Flower's differential privacy and SecAgg+ work with, and which options are refused."""

from __future__ import annotations

import pytest

from fedssl.engines.flower.site import load_site, site_federation
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.flower.loop_grid import SECURE, write_sites

WEIGHTS = ["fedbyol", "feddecorr", "fedema", "fedmoco_v3", "fedsimclr", "fedsimsiam", "fedu", "fedu2_without_eua"]
WEIGHTS += ["fedx", "lw_fedssl", "prog_fedssl", "supervised_fedavg"]
OWN_RULE = {"fedu2": "eua", "fedu2_without_fur": "eua", "fedu2_released": "mgda", "l_dawa": "l_dawa"}
NO_WEIGHTS = {
    "hetero_ssfl": r"aggregators.0 representation_mean has clients send something else",
    "fedca": r"aggregators.1 dictionary has clients send something else",
    "orchestra": r"aggregators.1 orchestra_clusters has clients send something else",
    "local_only": r"aggregators \[\] exchange none",
}
OPTIONS = {
    "local_dp": ["flower.differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0.5, delta: 1.0e-5}"],
    "fixed_clipping": ["flower.differential_privacy={name: fixed_clipping, clipping_norm: 1, noise_multiplier: 1}"],
    "secagg_plus": ["flower.secure_aggregation={name: secagg_plus}"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_which_recipes_take_it(option):
    """Those that average weights; those with a rule of their own take local noise alone."""
    key = "secure_aggregation" if option == "secagg_plus" else "differential_privacy"
    for name in WEIGHTS:
        load_recipe(name, ["engine=flower-simulation", *OPTIONS[option]])
    for name, rule in OWN_RULE.items():
        if option == "local_dp":
            load_recipe(name, ["engine=flower", *OPTIONS[option]])
            continue
        expected = rf"flower\.{key} {option} does not go with aggregators\.0 {rule}, which looks at each"
        with pytest.raises(UserError, match=expected) as caught:
            load_recipe(name, ["engine=flower", *OPTIONS[option]])
        assert "\n" not in str(caught.value)
    for name, why in NO_WEIGHTS.items():
        with pytest.raises(UserError, match=rf"flower\.{key} {option} works on .*{why}"):
            load_recipe(name, ["engine=flower", *OPTIONS[option]])


@pytest.mark.parametrize("option", OPTIONS)
def test_it_goes_neither_with_the_engine_in_this_process_nor_with_rounded_weights(option):
    with pytest.raises(UserError, match=rf"{option} is Flower's: use engine=flower-simulation or engine=flower"):
        load_recipe("fedbyol", OPTIONS[option])
    with pytest.raises(UserError, match=rf"transport bfloat16 does not go with flower\.\w+ {option}: .* use transport"):
        load_recipe("fedbyol", ["engine=flower", "transport=bfloat16", *OPTIONS[option]])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("differential_privacy={name: fixed}", r"flower.differential_privacy: .*'local_dp', 'fixed_clipping'"),
        ("differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0, delta: 1.0e-5}", "epsilon: .*got 0"),
        ("differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 1, delta: 2}", "delta: .*less than 1"),
        ("differential_privacy={name: fixed_clipping, clipping_norm: 1, noise: 1}", "noise: unknown key; .*delta"),
        ("epsilon_budget=3", "epsilon_budget limits what flower.differential_privacy spends, which is off"),
        ("secure_aggregation={name: secagg_plus, num_shares: 4}", "needs an odd num_shares, it is 4"),
    ],
)
def test_wrong_options(override, expected):
    with pytest.raises(UserError, match=expected):
        load_recipe("fedbyol", ["engine=flower", f"flower.{override}"])


def test_secure_aggregation_needs_a_second_client():
    with pytest.raises(UserError, match="needs 2 to 1023 clients a round, there are 1"):
        load_recipe("fedbyol", ["engine=flower", *OPTIONS["secagg_plus"], "clients_per_round=1"])


def test_a_client_with_more_images_than_max_weight_is_told(tiny, tmp_path):
    values = AVERAGED | {"engine": "flower", "flower": {"secure_aggregation": SECURE | {"max_weight": 30}}}
    with pytest.raises(UserError, match=r"client \d has more images than flower.secure_aggregation.max_weight 30"):
        build_federation(tiny(**values))
    sites = write_sites(tmp_path, 1, data={"name": "digits", "train_limit": 40, "public_holdout": 0})
    recipe = tiny(**values | {"partition": {"name": "sites", "clients": 3}})
    with pytest.raises(UserError, match="client 0 has more images") as caught:
        site_federation(recipe, load_site(sites[0]))
    assert "40" not in str(caught.value)  # the line leaves the site
