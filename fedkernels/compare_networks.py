"""CKA between the layers of two networks on the same data, in one pass over a loader."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkernels.accumulate_cka import CKAAccumulator
from fedkernels.internal import checks
from fedkernels.internal.layer_outputs import evaluation_mode, rows, run
from fedkernels.minibatch_cka import MinibatchCKA

ESTIMATORS = ("minibatch", "exact", "exact_debiased")


@dataclass(frozen=True, eq=False)  # tensors have no one truth of their equality
class Comparison:
    """The similarity of the layers of two networks."""

    matrix: Tensor  # [N, M] on the CPU: row n is layers_a[n], column m is layers_b[m]
    layers_a: list[str]
    layers_b: list[str]

    def heat_map(self, path: str | Path, title: str = "CKA") -> None:
        """Draws the matrix into an image whose format the name's ending gives, as in "similarity.png".

        Raises ImportError if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("heat_map draws by matplotlib: install it with `pip install matplotlib`") from error
        rows, columns = self.matrix.shape
        figure = Figure(figsize=(2.5 + 0.5 * columns, 1.8 + 0.4 * rows), layout="constrained")
        axes = figure.add_subplot()
        values = self.matrix.float().numpy()
        # Debiased values may be just below 0. One scale for all pictures, so that they can be compared.
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(columns), self.layers_b, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(rows), self.layers_a)
        axes.set(title=title, xlabel="second network", ylabel="first network")
        if rows * columns <= 200:
            for row in range(rows):
                for column in range(columns):
                    value = values[row, column]
                    colour = "black" if value > 0.6 else "white"
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        figure.colorbar(image)
        figure.savefig(path, dpi=150)


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    loader: Iterable[Any],
    layers: Sequence[str] | tuple[Sequence[str], Sequence[str]],
    estimator: str = "minibatch",
) -> Comparison:
    """CKA of the outputs of every named layer of one network with every one of another, on the same inputs.

    Both networks run in evaluation mode without gradients, once for each batch. Afterwards each module has the mode
    that it had, and the hooks are removed, also where an error ends the comparison.

    Args:
        model_a: the first network.
        model_b: the second, or the same object again. They may be on different devices.
        loader: batches, read once: a tensor or a mapping, or a tuple or list whose first element is one. The networks
            get a mapping as keyword arguments. Each batch goes to the device of a network's first parameter or buffer.
        layers: names of modules as in ``named_modules()``, for both networks, or a tuple of two such lists. Of a module
            that returns several tensors the first is taken. [L, ...] is flattened to [L, d].
        estimator: "minibatch" for `MinibatchCKA`, whose memory does not grow with the widths and which needs batches
            of at least 4. "exact" and "exact_debiased" for the value of all samples by `CKAAccumulator`: plain centred
            CKA, or debiased. With D_a and D_b the widths of all layers together they hold ``D_a D_b`` numbers in
            float64, and ``d^2`` for each layer; the squares of the outputs must be in the range of float32.

    Returns:
        A `Comparison` with ``matrix`` [N, M], ``layers_a``, ``layers_b`` and ``heat_map(path)``.

    Raises:
        TypeError: a model is not a module, or layers are not names.
        ValueError: an unknown layer, a layer that does not run, runs more than once in one pass or returns no floating
            tensor of one row for each sample; an empty loader; an unknown estimator; batches that the estimator
            refuses.
    """
    checks.one_of("estimator", estimator, ESTIMATORS)
    names_a, names_b = _names_of_both(layers)
    modules_a = _modules("model_a", model_a, names_a)
    modules_b = _modules("model_b", model_b, names_b)
    if model_b is model_a:  # one run has the outputs of both
        modules_a = modules_b = modules_a | modules_b
    accumulator: MinibatchCKA | CKAAccumulator = MinibatchCKA() if estimator == "minibatch" else CKAAccumulator()
    batches = 0
    with evaluation_mode(model_a, model_b), torch.no_grad():
        for batch in loader:
            outputs_a = _outputs("model_a", model_a, batch, modules_a)
            outputs_b = outputs_a if model_b is model_a else _outputs("model_b", model_b, batch, modules_b)
            xs = [outputs_a[name] for name in names_a]
            ys = [outputs_b[name].to(xs[0].device) for name in names_b]
            if any(len(one) != len(xs[0]) for one in xs + ys):
                sizes = [dict(zip(names_a, map(len, xs), strict=True)), dict(zip(names_b, map(len, ys), strict=True))]
                raise ValueError(f"layers must return one row for each sample, got rows {sizes[0]} and {sizes[1]}")
            accumulator.update(xs, ys)
            batches += 1
    if batches == 0:
        raise ValueError("loader must give at least one batch, got none")
    debiased = estimator == "exact_debiased"
    matrix = accumulator.compute(debiased) if isinstance(accumulator, CKAAccumulator) else accumulator.compute()
    return Comparison(matrix.cpu(), names_a, names_b)


def _names_of_both(layers: Any) -> tuple[list[str], list[str]]:
    of_each = isinstance(layers, tuple) and len(layers) == 2 and not any(isinstance(one, str) for one in layers)
    both = layers if of_each else (layers, layers)
    names = []
    for one in both:
        if isinstance(one, str) or not isinstance(one, Sequence) or not all(isinstance(name, str) for name in one):
            raise TypeError(f"layers must be a list of names or a tuple of two such lists, got {checks.short(layers)}")
        if not one:
            raise ValueError("layers must name at least one layer, got an empty list")
        names.append(list(one))
    return names[0], names[1]


def _modules(argument: str, model: object, names: list[str]) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, got {type(model).__name__}")
    known = dict(model.named_modules(remove_duplicate=False))  # a shared module has several names
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [one for one in known if one][:5]
            raise ValueError(f"{argument} has no layer {name!r}; did you mean one of {', '.join(close)}?")
    return {name: known[name] for name in names}


def _outputs(argument: str, model: nn.Module, batch: Any, modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        if name in outputs:
            raise ValueError(
                f"layer {name!r} of {argument} ran more than once in one pass, so that it has several outputs; name "
                "another layer, or the module that contains it"
            )
        # A copy, because the next layer may change it in place.
        outputs[name] = rows(output, f"layer {name!r} of {argument}").clone()

    place = next(chain(model.parameters(), model.buffers()), None)
    run(model, batch, None if place is None else place.device, modules, keep)
    for name in modules:
        if name not in outputs:
            raise ValueError(f"layer {name!r} of {argument} did not run in the network's forward pass")
    return outputs
