"""The table of operators: each path of each public function of fedkernels, once.

A path is a call of a public function that runs code of its own: another option, another number of rows, another input
that needs a gradient. A new operator or option is one more entry here, and what follows is tested of it. Tests of one
operator, test_NAME.py, hold what this table cannot know: values against an independent formula, and numerical edges.

What runs over the table (all but gradcheck, opcheck and export on a GPU too, where there is one; each file says more):

test_properties.py: values and gradients against the references in float64 at any size, dtype and layout; gradcheck.
test_contexts.py: torch.compile, export, autocast, transforms, forked workers, fake tensors; fedkernels.nn.
test_refusals.py: what every argument of every function refuses, with the message. Not: entries of tensors,
    CKAAccumulator, MinibatchCKA, compare and ViewOptions.
test_adversarial.py: NaN, infinity, duplicates, and huge or tiny entries in every input of every path, as by reference.
test_memory_and_autograd.py: overlapping inputs, leaves used again, subclasses, changes before the backward pass.
Beside it test_compiled_operators.py has opcheck and threads, and test_cuda.py what only a GPU shows.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fedkernels as fk  # on a GPU conftest.py replaces its functions
from tests.fedkernels import inputs as kinds
from tests.fedkernels.inputs import FP64, Inputs

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Path(NamedTuple):
    """A path of a public function. Its floating inputs are differentiable, or `no_gradient` says why they are not."""

    call: Callable[..., Tensor]  # of the inputs, and of options by name; of REFERENCES where these are the `source`
    inputs: Inputs  # see inputs.py
    draws: Mapping[str, Sequence[Any]] = NOTHING  # options and the values that random examples draw for them
    scale: Callable[..., tuple[float, list[float]]] | None = None  # what is summed, see inputs.py
    exact: Mapping[str, Any] = NOTHING  # options for finite differences, which need a solver's last digits
    symmetric: tuple[int, ...] = ()  # inputs that must stay symmetric matrices
    fixed: tuple[int, ...] = ()  # floating inputs that get no gradient here: with it another path is taken
    no_gradient: str = ""
    no_forward_mode: str = ""
    by_reference: str = ""  # why the reference serves where an input requires a gradient
    certified: str = ""  # why results are not simply compared, and where something else holds of them

    def learns(self, number: int, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and number not in self.fixed and not self.no_gradient

    def leaves(self, tensors: Sequence[Tensor], dtype: torch.dtype = FP64) -> list[Tensor]:
        """Copies, of which those require a gradient that the path has one for."""
        copies = [x.detach().to(dtype if x.is_floating_point() else x.dtype, copy=True) for x in tensors]
        return [x.requires_grad_(self.learns(number, x)) for number, x in enumerate(copies)]


def value_and_gradients(call: Callable[..., Tensor], leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """The gradients of its sum, where it has any."""
    value = call(*leaves, **options)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [value.detach(), *(torch.autograd.grad(value.sum(), asked) if value.requires_grad else ())]


class Scalar(NamedTuple):
    """An argument that is a number, above `least`; or a tensor of one entry ("entry") or of other shapes ("vector")."""

    value: float
    least: float | None = 0.0
    kind: str = "number"


class Choice(NamedTuple):
    """An argument that is one of some strings."""

    value: str


class Operator(NamedTuple):
    """A public function."""

    arguments: Mapping[str, Any]  # good ones, small; what each refuses follows from what it is: test_refusals.py
    paths: Mapping[str, Path]  # "" is the plain one
    misfits: Sequence[tuple[Mapping[str, Any], str]]  # arguments that do not fit the others, and the message


def info_nce_densely(
    query: Tensor,
    key: Tensor,
    temperature: float | Tensor,
    reduction: str = "mean",
    *,
    positives: int | Tensor = 0,
    negatives: Tensor | None = None,
    labels: tuple[Tensor, Tensor] | None = None,
    excluded: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """By cross-entropy, with all its options."""
    key = key if negatives is None else torch.cat([key, negatives])
    rows = torch.arange(len(query))
    positives = positives if isinstance(positives, Tensor) else rows + positives
    left_out = torch.zeros(len(query), len(key), dtype=torch.bool) if excluded is None else excluded.clone()
    if labels is not None:
        left_out |= labels[0][:, None] == labels[1]
    left_out[rows, positives] = False
    logits = (query @ key.T / temperature).masked_fill(left_out, -torch.inf)
    return F.cross_entropy(logits, positives, reduction=reduction)


OF_SAME_NAME = "nt_xent", "clip_loss", "sigmoid_loss", "supervised_contrastive_loss", "linear_cka"
# What the public functions are held to, under their names.
REFERENCES = SimpleNamespace(
    info_nce=info_nce_densely,
    linear_cka_to_kernel=fk.reference.linear_cka.linear_cka_to_kernel,
    linear_cka_pairwise=fk.reference.linear_cka.linear_cka_pairwise,
    **{name: getattr(getattr(fk.reference, name), name) for name in OF_SAME_NAME},
)


def of(name: str, *numbers: Any, of_inputs: Callable[..., dict[str, Any]] | None = None, **options: Any) -> Any:
    """A call of the function in `source`: of inputs, then `numbers`; options come last from what is drawn."""

    def call(*tensors: Tensor, source: Any = fk, **drawn: Any) -> Tensor:
        more = of_inputs(*tensors) if of_inputs is not None else {}
        result = getattr(source, name)(*tensors, *numbers, **options | more | drawn)
        return result if isinstance(result, Tensor) else result[0]

    return call


REDUCTIONS = {"reduction": ("mean", "sum", "none")}
BY_TEMPERATURE = {"temperature": (0.05, 0.2, 1.0, 10.0), **REDUCTIONS}
BY_SCALE = {"logit_scale": (0.1, 1.0, 5.0, 20.0), **REDUCTIONS}
CENTERED = {"centered": (False, True)}


def loss(call: Callable[..., Tensor], inputs: Inputs, draws: Mapping[str, Sequence[Any]] = BY_TEMPERATURE) -> Path:
    return Path(call, inputs, draws, kinds.of_similarities)


def info_nce(**options: Any) -> Callable[..., Tensor]:
    return of("info_nce", **{"temperature": 0.3} | options)


def between(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    return {"positives": kinds.labels_of(query) % key.shape[0], "excluded": kinds.mask_of(query, key)}


def left_out(query: Tensor, key: Tensor, negatives: Tensor, source: Any = fk, **options: Any) -> Tensor:
    """By label and by pair, beside positives by number."""
    labels = kinds.labels_of(query, classes=3), kinds.labels_of(key, negatives, classes=4)
    excluded = kinds.labels_of(query, classes=7)[:, None] == kinds.labels_of(key, negatives)
    ways = {"negatives": negatives, "labels": labels, "excluded": excluded}
    return source.info_nce(query, key, **{"temperature": 0.3} | options, **ways)


def by_offset(query: Tensor, key: Tensor, negatives: Tensor, source: Any = fk, **options: Any) -> Tensor:
    """The positive of each query but the first is the key of its number."""
    options = {"temperature": 0.3} | options
    return source.info_nce(query[1:], key, positives=1, negatives=negatives, **options)


def supervised(features: Tensor, temperature: float | Tensor = 2.0, source: Any = fk, **options: Any) -> Tensor:
    return source.supervised_contrastive_loss(features, kinds.labels_of(features), temperature, **options)


R, WIDE, LABELS = torch.ones(4, 3), torch.ones(4, 2), torch.tensor([0, 0, 1, 1])
TEMPERATURE, REDUCTION = Scalar(0.5, kind="entry"), Choice("mean")
OF_CONTRASTIVE = {
    "info_nce": Operator(
        {
            "query": R,
            "key": R,
            "temperature": TEMPERATURE,
            "reduction": REDUCTION,
            "positives": LABELS,
            "negatives": R[:2],
            "labels": (LABELS, torch.cat([LABELS, LABELS[:2]])),
            "excluded": torch.ones(4, 6, dtype=torch.bool),
            "recompute": False,
        },
        {
            "": loss(info_nce(), kinds.queries_and_keys),
            "not reduced": loss(info_nce(reduction="none"), kinds.queries_and_keys, {}),
            "recompute": loss(info_nce(recompute=True), kinds.queries_and_keys),
            "temperature": loss(of("info_nce"), kinds.with_scalars(kinds.queries_and_keys, 0.25), REDUCTIONS),
            "offset and negatives": loss(by_offset, kinds.at_least(2, kinds.with_negatives)),
            "positives and excluded": loss(info_nce(of_inputs=between), kinds.queries_and_keys),
            "labels, excluded and negatives": loss(left_out, kinds.with_negatives),
        },
        [
            ({"query": R[:0]}, "query must not be empty in B or d, got shape [0, 3]"),
            ({"query": R[:, :0], "key": R[:, :0]}, "query must not be empty in B or d, got shape [4, 0]"),
            ({"key": WIDE}, "key must have the d = 3 columns of query, got 2"),
            ({"key": R[:3], "positives": 0}, "key must have at least the B = 4 rows of query, got 3"),
            ({"positives": 1}, "key must have at least the B = 4 rows of query from row 1 on, got 4"),
            ({"positives": -1}, "positives must be an offset of at least 0, got -1"),
            ({"key": R[:0]}, "key must not be empty in N, got shape [0, 3]"),
            ({"negatives": WIDE}, "negatives must have the d = 3 columns of query, got 2"),
        ],
    ),
    "nt_xent": Operator(
        {"view1": R, "view2": R, "temperature": TEMPERATURE, "reduction": REDUCTION},
        {
            "": loss(of("nt_xent", temperature=0.3), kinds.pairs),
            "not reduced": loss(of("nt_xent", temperature=0.3, reduction="none"), kinds.pairs, {}),
            "temperature": loss(of("nt_xent"), kinds.with_scalars(kinds.pairs, 0.25), REDUCTIONS),
        },
        [
            ({"view1": R[:0], "view2": R[:0]}, "view1 must not be empty in B or d, got shape [0, 3]"),
            ({"view1": R[:, :0], "view2": R[:, :0]}, "view1 must not be empty in B or d, got shape [4, 0]"),
            ({"view2": R[:3]}, "view2 must have the shape [4, 3] of view1, got [3, 3]"),
        ],
    ),
    "clip_loss": Operator(
        {"image": R, "text": R, "logit_scale": TEMPERATURE, "reduction": REDUCTION},
        {
            "": loss(of("clip_loss", logit_scale=0.7), kinds.pairs, BY_SCALE),
            "logit_scale": loss(of("clip_loss"), kinds.with_scalars(kinds.pairs, 3.0), REDUCTIONS),
        },
        [
            ({"image": R[:0], "text": R[:0]}, "image must not be empty in B or d, got shape [0, 3]"),
            ({"text": WIDE}, "text must have the shape [4, 3] of image, got [4, 2]"),
        ],
    ),
    "supervised_contrastive_loss": Operator(
        {"features": R, "labels": LABELS, "temperature": TEMPERATURE, "reduction": REDUCTION},
        {
            "even": loss(supervised, kinds.features(0)),
            "odd, temperature": loss(supervised, kinds.with_scalars(kinds.features(1), 0.25), REDUCTIONS),
        },
        [
            ({"features": R[:0], "labels": LABELS[:0]}, "features must not be empty in B or d, got shape [0, 3]"),
            ({"features": R[:3]}, "labels must have shape [B] = [3], got [4]"),
        ],
    ),
    "sigmoid_loss": Operator(
        {
            "image": R,
            "text": R,
            "logit_scale": TEMPERATURE,
            "logit_bias": Scalar(-1.0, least=None, kind="entry"),
            "reduction": REDUCTION,
        },
        {
            "": loss(of("sigmoid_loss", logit_scale=0.7, logit_bias=-2.0), kinds.pairs, BY_SCALE)._replace(
                scale=kinds.of_all_pairs
            ),
            "not reduced": Path(of("sigmoid_loss", 3.0, -2.0, "none"), kinds.pairs, scale=kinds.of_all_pairs),
            "scale and bias": Path(
                of("sigmoid_loss"), kinds.with_scalars(kinds.pairs, 3.0, -2.0), REDUCTIONS, kinds.of_all_pairs
            ),
        },
        [
            ({"image": R[:0], "text": R[:0]}, "image must not be empty in B or d, got shape [0, 3]"),
            ({"text": R[:3]}, "text must have the shape [4, 3] of image, got [3, 3]"),
        ],
    ),
}

# ---- CKA ----------------------------------------------------------------------------------------------------


def lists(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda x, y, z, source=fk, **drawn: getattr(source, name)([x, y], [z, x], **options | drawn)


def with_itself(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda *layers, source=fk, **drawn: getattr(source, name)(layers, layers, **options | drawn)


def of_lists(name: str, inputs: Inputs, **how: Any) -> dict[str, Path]:
    """Of different layers, and of the same."""
    how["by_reference"] = KEEPS_NOTHING
    return {"": Path(lists(name), inputs, **how), "with itself": Path(with_itself(name), inputs, **how)}


KEEPS_NOTHING = "the compiled operator keeps no products, which the gradients need"
CANCELS = "of few samples sums nearly cancel: test_debiased_cka.py has its precision"
OF_PAIRS = [
    ({"y": R[:, :0]}, "y must not be empty in L or d, got shape [4, 0]"),
    ({"y": torch.ones(5, 3)}, "y must have the L = 4 rows of x, got 5"),
    ({"x": torch.ones(2, 4, 3), "y": torch.ones(3, 4, 3)}, "y must have leading dimensions that broadcast against [2]"),
]
OF_LISTS = [
    ({"xs": []}, "xs must hold at least one tensor, got an empty list"),
    ({"ys": ()}, "ys must hold at least one tensor, got an empty list"),
    ({"xs": [R[:, :0]]}, "xs[0] must not be empty in L or d, got shape [4, 0]"),
    ({"ys": [R, torch.ones(5, 3)]}, "ys[1] must have the L = 4 rows of xs[0], got 5"),
]
TO_KERNEL = Path(
    of("linear_cka_to_kernel"), kinds.with_kernel(kinds.representations), CENTERED, kinds.of_cka, symmetric=(1,)
)
OF_SIMILARITIES = {
    "linear_cka": Operator(
        {"x": R, "y": WIDE, "centered": False},
        {
            "": Path(of("linear_cka"), kinds.representations, CENTERED, kinds.of_cka),
            "a batch": Path(of("linear_cka", centered=True), kinds.batches, CENTERED, kinds.of_cka),
        },
        [*OF_PAIRS, ({"x": R[:0], "y": R[:0]}, "x must not be empty in L or d, got shape [0, 3]")],
    ),
    "linear_cka_to_kernel": Operator(
        {"x": R, "kernel": torch.eye(4), "centered": False},
        {
            "": TO_KERNEL._replace(fixed=(1,)),
            "a batch": TO_KERNEL._replace(inputs=kinds.with_kernel(kinds.batches), fixed=(1,)),
            "a gradient in the kernel": TO_KERNEL._replace(by_reference=KEEPS_NOTHING),
        },
        [
            ({"x": R[:0], "kernel": R[:0, :0]}, "x must not be empty in L or d, got shape [0, 3]"),
            ({"kernel": torch.ones(4, 5)}, "kernel must be [..., 4, 4] for the 4 rows of x, got [4, 5]"),
            ({"x": torch.ones(2, 4, 3), "kernel": torch.ones(3, 4, 4)}, "kernel must have leading dimensions that"),
        ],
    ),
    "linear_cka_pairwise": Operator(
        {"xs": [R, R], "ys": [WIDE], "centered": False},
        of_lists("linear_cka_pairwise", kinds.three, draws=CENTERED, scale=kinds.of_cka),
        OF_LISTS,
    ),
    "debiased_cka": Operator(
        {"x": R, "y": WIDE},
        {
            "": Path(of("debiased_cka"), kinds.at_least(4, kinds.representations), certified=CANCELS),
            "a batch": Path(of("debiased_cka"), kinds.at_least(4, kinds.batches), certified=CANCELS),
        },
        [*OF_PAIRS, ({"x": R[:3], "y": R[:3]}, "x must have at least 4 rows for debiased CKA, got 3")],
    ),
    "debiased_cka_pairwise": Operator(
        {"xs": [R, R], "ys": [WIDE]},
        of_lists("debiased_cka_pairwise", kinds.at_least(4, kinds.three), certified=CANCELS),
        [*OF_LISTS, ({"xs": [R[:3]], "ys": [R[:3]]}, "xs[0] must have at least 4 rows for debiased CKA, got 3")],
    ),
}

# ---- transport ----------------------------------------------------------------------------------------------

NO_TANGENT = "its derivative is that of the envelope theorem, and an error in forward mode"
CERTIFIED = "two solvers need not find the same plan: test_properties.py certifies both"


def transport(inputs: Inputs = kinds.problem, **options: Any) -> Path:
    call = of("unbalanced_ot", 0.8, 0.9, **{"tol": 1e-6} | options)
    return Path(call, inputs, exact={"tol": 1e-13}, no_forward_mode=NO_TANGENT, certified=CERTIFIED)


PLAN = transport()._replace(call=of("unbalanced_ot_plan", 0.8, 0.9, tol=1e-10, method="interior_point"))
MASSES = Scalar(1.0, least=None, kind="vector")
OF_TRANSPORT = {
    "cost": R,
    "a": MASSES,
    "b": MASSES,
    "tau_a": Scalar(0.8),
    "tau_b": Scalar(0.8),
    "row_mask": torch.ones(4, dtype=torch.bool),
    "column_mask": torch.ones(3, dtype=torch.bool),
    "tol": Scalar(1e-4),
    "max_iterations": 1000,
    "method": Choice("accelerated"),
}
OF_PROBLEMS = [
    ({"cost": R[:0]}, "cost must not be empty in M or N, got shape [0, 3]"),
    ({"a": torch.ones(3)}, "a must be a number or have shape [..., 4]"),
    ({"a": torch.ones(1)}, "a must be a number or have shape [..., 4]"),
    ({"b": torch.ones(5, 3)}, "b must broadcast to [3]"),
    ({"row_mask": torch.ones(5, 4, dtype=torch.bool)}, "row_mask must broadcast to [4]"),
    ({"row_mask": torch.ones(3, dtype=torch.bool)}, "row_mask must have shape [..., 4]"),
    ({"max_iterations": 0}, "max_iterations must be a positive"),
    ({"tau_a": 10**400}, "tau_a must be positive and finite"),
    ({"a": 10**5000}, "a must be finite, got an integer of"),
]
OF_PLANS = {
    "unbalanced_ot": Operator(
        OF_TRANSPORT,
        {
            "": transport(),
            "a batch, masks": transport(kinds.problems, of_inputs=kinds.masks),
            "interior point": transport(method="interior_point"),
            "interior point, masks": transport(method="interior_point", of_inputs=kinds.masks),
            "steepest descent": transport(kinds.one_pair, method="steepest"),
        },
        OF_PROBLEMS,
    ),
    "unbalanced_ot_plan": Operator(
        OF_TRANSPORT,
        {
            "": PLAN._replace(fixed=(0, 1, 2)),
            "gradients": PLAN._replace(by_reference="they are the solution of equations, in plain PyTorch"),
        },
        OF_PROBLEMS,
    ),
}

# ---- the server's step, and views ---------------------------------------------------------------------------


def of_models(start: Tensor, *clients: Tensor) -> Tensor:
    return fk.delta_gram([start], [[client] for client in clients])


def applied(start: Tensor, *clients: Tensor) -> Tensor:
    """Of a copy, for it writes in place."""
    start = start.detach().clone()
    fk.apply_deltas([start], [[client] for client in clients], [0.3, 0.9])
    return start


def views(pictures: Tensor, samples: Tensor) -> Tensor:
    return torch.stack(fk.two_views(pictures, samples, KEY, OPTIONS))


def drawn_for_views(samples: Tensor) -> Tensor:
    drawn = fk.view_parameters(samples, KEY, 12, 14, OPTIONS)
    return torch.cat([one.double().reshape(*one.shape[:2], -1) for one in drawn], 2)


OF_A_SERVER = "it is computed where there is no graph"
NOT_UNIQUE = "weights are unique in well-conditioned problems only: test_client_weights.py compares the optimum"
TO_THE_BIT = "it is compared to the last bits: test_properties.py"
OF_IMAGES = "images are integers"
WEIGHTS = Path(of("client_weights"), kinds.gram, symmetric=(0,), no_gradient=OF_A_SERVER, certified=NOT_UNIQUE)
KEY, OPTIONS = fk.ViewKey(0), fk.ViewOptions(solarize=0.3, hue=0.5)
IMAGES, N = torch.ones(4, 3, 6, 6, dtype=torch.uint8), torch.arange(4)
OF_KEYS = [
    ({"key": (1, 2, 3, 4)}, "key must be a ViewKey, got tuple"),
    ({"key": fk.ViewKey("7")}, "key.seed must be an integer, got str"),
    ({"key": fk.ViewKey(1, 2.0)}, "key.client must be an integer, got float"),
    ({"key": fk.ViewKey(1, True)}, "key.client must be an integer, got bool"),
    ({"key": fk.ViewKey(2**63)}, "key.seed must be between 0 and 2^63 - 1, got 9223"),
    ({"key": fk.ViewKey(1, epoch=-1)}, "key.epoch must be between 0 and 2^32 - 1, got -1"),
    ({"options": {"flip": 0}}, "options must be a ViewOptions, got dict"),
]
OF_PARAMETERS = [
    ({"global_params": []}, "global_params must hold at least one tensor, got an empty list"),
    ({"client_params": []}, "client_params must hold at least one client, got an empty list"),
    ({"client_params": [[R, R], [R]]}, "client_params[1] must hold 2 tensors as global_params does, got 1"),
    ({"client_params": [[R, R.T]]}, "client_params[0][1] must have the shape [4, 3] of global_params[1], got [3, 4]"),
    ({"client_params": [R]}, "client_params[0] must be a list of tensors, got Tensor"),
]
OF_SERVER_AND_CLIENTS = {
    "client_weights": Operator(
        {"gram": torch.eye(4), "lower_bounds": Scalar(0.1, least=None, kind="vector"), "tol": Scalar(1e-8)},
        {"": WEIGHTS, "lower bounds": WEIGHTS._replace(call=of("client_weights", lower_bounds=0.01))},
        [
            ({"gram": R[:0, :0]}, "gram must not be empty in K, got shape [0, 0]"),
            ({"gram": WIDE}, "gram must have shape [..., K, K], got [4, 2]"),
            ({"lower_bounds": torch.ones(2)}, "lower_bounds must be a number or have shape [..., 4]"),
            ({"lower_bounds": torch.zeros(5, 4)}, "lower_bounds must broadcast to [4]"),
            ({"lower_bounds": -0.1}, "lower_bounds must not be negative or NaN, got -0.1"),
            ({"lower_bounds": torch.nan}, "lower_bounds must be finite, got nan"),
            ({"lower_bounds": 0.5}, "lower_bounds must have a sum of at most 1, got 2"),
        ],
    ),
    "delta_gram": Operator(
        {"global_params": [R, R], "client_params": [[R, R]]},
        {"": Path(of_models, kinds.models, no_gradient=OF_A_SERVER, certified=TO_THE_BIT)},
        OF_PARAMETERS,
    ),
    "apply_deltas": Operator(
        {"global_params": [R, R], "client_params": [[R, R]], "weights": torch.ones(1)},
        {"": Path(applied, kinds.models, no_gradient=OF_A_SERVER, certified=TO_THE_BIT)},
        [
            *OF_PARAMETERS,
            ({"weights": torch.ones(2)}, "weights must hold one number for each of the 1 clients, got 2"),
            ({"weights": [torch.nan]}, "weights must be finite, got [nan]"),
            ({"weights": [10**400]}, "weights must be a tensor [K] or a list of K numbers"),
            ({"weights": [None]}, "weights must be a tensor [K] or a list of K numbers"),
            ({"weights": [True]}, "weights must be a tensor [K] or a list of K numbers"),
        ],
    ),
    "two_views": Operator(
        {"images": IMAGES, "samples": N, "key": KEY, "options": OPTIONS},
        {"": Path(views, kinds.images, no_gradient=OF_IMAGES, certified=TO_THE_BIT)},
        [
            *OF_KEYS,
            ({"images": IMAGES[0]}, "images must have shape [n, C, H, W]"),
            ({"images": IMAGES[:, :0]}, "images must have shape [n, C, H, W]"),
            ({"images": IMAGES[:, :, :1]}, "sides of at least 2, got [4, 3, 1, 6]"),
            ({"samples": N[None]}, "samples must have shape [n], got [1, 4]"),
            ({"samples": N[:1]}, "samples must have one number for each of the 4 images, got 1"),
            ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.bfloat16, got torch.float16"),
            ({"memory_format": torch.preserve_format}, "memory_format must be torch.contiguous_format or"),
        ],
    ),
    "view_parameters": Operator(
        {"samples": N, "key": KEY, "height": 6, "width": 6, "options": OPTIONS},
        {
            "": Path(
                drawn_for_views, lambda *sizes: kinds.images(*sizes)[1:], no_gradient=OF_IMAGES, certified=TO_THE_BIT
            )
        },
        [*OF_KEYS, ({"width": 1}, "width must be at least 2"), ({"height": 2**63}, "height must be at least 2 and be")],
    ),
}

OF_SIGREG = {
    "sigreg": Operator(
        {"rows": R, "directions": R[:3, :2], "points": 17, "limit": Scalar(5.0)},
        {"": Path(of("sigreg"), kinds.rows_and_directions, fixed=(1,), certified="test_sigreg.py compares")},
        [
            ({"directions": R}, "directions must have the d = 3 columns of rows as rows, got 4"),
            ({"rows": R[:0]}, "rows must not be empty in B, got shape [0, 3]"),
            ({"directions": R[:3, :0]}, "directions must not be empty in d or S, got shape [3, 0]"),
            ({"points": 16}, "points must be odd and at least 3, got 16"),
        ],
    )
}
OPERATORS = OF_SIGREG | OF_CONTRASTIVE | OF_SIMILARITIES | OF_PLANS | OF_SERVER_AND_CLIENTS
# What else is public, and is no operator.
OTHERS = {
    "CKAAccumulator": "a state: test_accumulate_cka.py",
    "GradientCache": "two passes around any loss: test_gradient_cache.py",
    "MinibatchCKA": "a state: test_accumulate_cka.py",
    "compare": "a loop over networks and data: test_compare_networks.py",
    "Comparison": "what compare returns",
    "TransportInfo": "what unbalanced_ot_plan returns beside the plan",
    "ViewKey": "an argument of two_views",
    "ViewOptions": "an argument of two_views",
    "ViewParameters": "what view_parameters returns",
    "build_info": "tells what is compiled",
    "self_test": "tests the others",
}
PATHS = {f"{name}, {path}" if path else name: one for name in OPERATORS for path, one in OPERATORS[name].paths.items()}
DIFFERENTIABLE = [name for name, path in PATHS.items() if not path.no_gradient and name != "unbalanced_ot_plan"]
