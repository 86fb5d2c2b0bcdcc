"""torch_cka's comparison of two models, layer by layer."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fedkernels.internal.layer_outputs import evaluation_mode, rows, run
from fedkernels.internal.similarity import FEWEST_DEBIASED_ROWS
from fedkernels.reference.hsic_pairwise import _grams, _hsic
from fedkernels.reference.linear_cka import center

__all__ = ["CKA"]


class CKA:
    """torch_cka's ``CKA``: CKA of all pairs of layers, from unbiased estimates of HSIC that are averaged over batches.

    Differences: a value is 0 where an estimate of a layer with itself is not positive; the original gets NaN there and
    raises an AssertionError. Rows and columns have the order of the names in ``export``; the original has that in which
    layers finish, so that a module which holds others is not where its name is. One loader is read once for both
    models, where the original reads it twice and pairs different batches if it shuffles. An output counts as it was
    returned, also where the next layer changes it in place; of a tuple or mapping the first floating tensor counts, of
    a layer that runs several times its last output. The models keep no hooks. There are no warnings, no progress bar
    and no ``plot_results``: draw ``export()["CKA"]`` with matplotlib's ``imshow``.

    Source: Nguyen et al. 2021, "Do Wide and Deep Networks Learn the Same Things?", Eq. 2 and 3.
    """

    def __init__(
        self,
        model1: nn.Module,
        model2: nn.Module,
        model1_name: str | None = None,
        model2_name: str | None = None,
        model1_layers: list[str] | None = None,
        model2_layers: list[str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.models = [model.to(device).eval() for model in (model1, model2)]
        self.names = [model1_name or type(model1).__name__, model2_name or type(model2).__name__]
        self.layers = [_layers(model1, model1_layers, "model1_layers"), _layers(model2, model2_layers, "model2_layers")]
        self.device = device
        self.hsic_matrix: Tensor | None = None
        self.datasets = ["", ""]

    def compare(self, dataloader1: Iterable[Any], dataloader2: Iterable[Any] | None = None) -> None:
        """Runs both models on each batch of at least 4 samples: a tensor or mapping, or a tuple that begins with one.

        Args:
            dataloader1: batches, read once for both models; a generator or a loader that shuffles will do.
            dataloader2: as many batches for the second model, of the same samples in the same order.
        """
        loaders = [dataloader1, dataloader1 if dataloader2 is None else dataloader2]
        self.datasets = [_name_of_data(loader) for loader in loaders]
        # One pass over one loader: a second one would be of other batches where it shuffles, or of none.
        pairs = zip_longest(*loaders) if loaders[1] is not dataloader1 else ((batch, batch) for batch in dataloader1)
        sums: list[Tensor] = []
        with evaluation_mode(*self.models), torch.no_grad():
            for batches in pairs:
                if any(batch is None for batch in batches):
                    raise ValueError("dataloader2 must have as many batches as dataloader1; one of them ends earlier")
                first, second = (self._grams_of(index, batch) for index, batch in enumerate(batches))
                samples = first.shape[1]
                if second.shape[1] != samples:
                    raise ValueError("dataloader2 must have batches of the same sizes as dataloader1")
                terms = [term / (samples * (samples - 3)) for term in _hsic(first, second)]  # N (N - 3) of Eq. 3
                sums = [total + term for total, term in zip(sums, terms, strict=True)] if sums else terms
        if not sums:
            raise ValueError("dataloader1 must have at least one batch, got none")
        cross, of_first, of_second = sums
        of_first = of_first[:, None]
        values = cross / (of_first * of_second).sqrt()
        self.hsic_matrix = values.masked_fill((of_first <= 0) | (of_second <= 0), 0).float().cpu()

    def _grams_of(self, index: int, batch: Any) -> Tensor:
        """The layers' Gram matrices on a batch: [layers, N, N] float64. The features may take much more."""
        model, names, argument = self.models[index], self.layers[index], f"model{index + 1}"
        known = dict(model.named_modules(remove_duplicate=False))
        grams: dict[str, Tensor] = {}

        def keep(name: str, output: Any) -> None:
            features = rows(output, f"layer {name!r} of {argument}").double()
            if len(features) < FEWEST_DEBIASED_ROWS:
                raise ValueError(f"a batch must have at least {FEWEST_DEBIASED_ROWS} samples, got {len(features)}")
            grams[name] = _grams([center(features)])[0]

        run(model, batch, self.device, {name: known[name] for name in names}, keep)
        missing = [name for name in names if name not in grams]
        if missing:
            raise ValueError(f"{argument}_layers must be layers that run in the forward pass, got {missing}")
        if len({len(gram) for gram in grams.values()}) > 1:
            sizes = {name: len(gram) for name, gram in grams.items()}
            raise ValueError(f"{argument}_layers must be layers that return one row for each sample, got rows {sizes}")
        return torch.stack([grams[name] for name in names])

    def export(self) -> dict[str, Any]:
        """The values [layers of model1, layers of model2] under "CKA", with the names of models, layers and data."""
        if self.hsic_matrix is None:
            raise ValueError("there is nothing to export: call compare() before export()")
        return {
            "model1_name": self.names[0],
            "model2_name": self.names[1],
            "CKA": self.hsic_matrix,
            "model1_layers": self.layers[0],
            "model2_layers": self.layers[1],
            "dataset1_name": self.datasets[0],
            "dataset2_name": self.datasets[1],
        }


def _layers(model: nn.Module, wanted: list[str] | None, argument: str) -> list[str]:
    """The names of the wanted modules in the model's order; all of them for None, itself ("") included."""
    if wanted is None:  # a ModuleList has no forward
        return [name for name, module in model.named_modules() if type(module).forward is not nn.Module.forward]
    if not wanted:
        raise ValueError(f"{argument} must name at least one layer, got {wanted}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]  # a shared module has several names
    missing = set(wanted) - set(names)
    if missing:
        raise ValueError(f"{argument} must be names of named_modules(), got {sorted(missing)}")
    return [name for name in names if name in wanted]


def _name_of_data(loader: Any) -> str:
    data = getattr(loader, "dataset", None)
    return type(loader).__name__ if data is None else repr(data).split("\n")[0]
