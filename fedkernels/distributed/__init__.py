"""Losses over the rows of all ranks of a torch.distributed process group.

What follows is about the contrastive losses. `sigreg` adds up sums of all ranks: of it the last two paragraphs tell.

Each rank passes the embeddings of its own batch and gets the loss of its own queries against the keys of all ranks.
There are two ways to bring the keys together, with the same results to rounding:

- ``method="gather"``: every rank gets all keys at once (all-gather), and gradients return by reduce-scatter. Each rank
  holds O(world_size * B * d) while it computes.
- ``method="ring"``: the keys of one rank at a time travel from rank to rank, and gradients travel along in the backward
  pass. Each rank holds O(B * d), whatever the number of ranks.

Both save O(B * d) for the backward pass: the rank's own embeddings and one number for each query. The logits are formed
in blocks and are never held whole. Labels, one number a row, are always gathered.

The gradient of a rank's input is that of the sum of all ranks' losses. Averaged over the ranks, as
DistributedDataParallel averages the gradients of parameters, it is the gradient of one process with the whole batch.
Ranks may have batches of different sizes: see ``reduction``.

All ranks of the group have to call the loss, and its backward pass, the same number of times in the same order. If a
rank dies, the others get the error of the process group's backend or, at the latest, its timeout
(``torch.distributed.init_process_group(timeout=...)``).

The contrastive losses have first derivatives only; a second one and forward mode are a RuntimeError.
"""

from fedkernels.distributed._ranks import Method as Method
from fedkernels.distributed.clip_loss import clip_loss
from fedkernels.distributed.info_nce import info_nce
from fedkernels.distributed.nt_xent import nt_xent
from fedkernels.distributed.sigmoid_loss import sigmoid_loss
from fedkernels.distributed.sigreg import sigreg
from fedkernels.distributed.supervised_contrastive_loss import supervised_contrastive_loss

__all__ = ["clip_loss", "info_nce", "nt_xent", "sigmoid_loss", "sigreg", "supervised_contrastive_loss"]
