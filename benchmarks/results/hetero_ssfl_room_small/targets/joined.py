"""Print how good the encoders of a run's clients are together: ``python joined.py RUN [--untrained]``.

Each encoder is half-whitened on the public images, and the joined features are projected to 160 principal components of
theirs there. With --untrained, the networks are those with which the clients began.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fedssl.aggregators.representation_mean import whitening_matrix
from fedssl.evaluation.features import extract_features
from fedssl.evaluation.linear import linear_accuracy
from fedssl.evaluation.metrics import knn_accuracy
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_stored_recipe
from fedssl.run_folder.directory import RunDirectory

COMPONENTS = 160

run, untrained = Path(sys.argv[1]), "--untrained" in sys.argv
recipe = load_stored_recipe(RunDirectory.open(run), trust=True)
federation = build_federation(recipe)
data = federation.dataset
assert data.public_images is not None
train, test, public = [], [], []
for k in range(recipe.partition.clients):
    trained = None if untrained else encoder_of_run(run, k, trust=True).encoder.network
    encoder = federation.client(k, Message()).model.encoder.eval() if trained is None else trained
    features = extract_features(encoder, data.public_images)
    whitening = whitening_matrix(features)
    public.append(features @ whitening)
    train.append(extract_features(encoder, data.train_images) @ whitening)
    test.append(extract_features(encoder, data.test_images) @ whitening)
joined = torch.cat(public, dim=1).double()
centred = joined - joined.mean(dim=0)
components = torch.linalg.eigh(centred.T @ centred)[1][:, -COMPONENTS:].float()
a, b = ((torch.cat(x, dim=1) - joined.mean(dim=0).float()) @ components for x in (train, test))
labelled = (a, data.train_labels, b, data.test_labels)
options = recipe.evaluation
knn = knn_accuracy(*labelled, neighbors=options.neighbors, temperature=options.temperature)
linear = linear_accuracy(*labelled, len(data.class_names), options.linear, 0)
print(f"{COMPONENTS} components of {len(train)} encoders: knn {knn:.2f}, linear {linear:.2f}")
