"""The former place of `fedkernels.compat`: imports from here go on, with a warning."""

import sys
import warnings
from importlib import import_module

warnings.warn("fedkernels.drop_in is deprecated: import from fedkernels.compat", DeprecationWarning, stacklevel=2)
for _name in ("lightly", "open_clip", "pytorch_metric_learning", "sentence_transformers", "torch_cka", "torchjd"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = import_module(f"fedkernels.compat.{_name}")
