"""The extraction of representations that all evaluations share."""

import copy
import dataclasses
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl.data.datasets import Dataset
from fedssl.errors import UserError
from fedssl.evaluation import evaluate
from fedssl.evaluation import features as features_module
from fedssl.evaluation.evaluate import EvaluationOptions
from fedssl.evaluation.features import extract_features, measured_on
from fedssl.models.model import Model
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.evaluation.conftest import bright_quarters


def test_features_are_the_encoders_output_in_evaluation_mode(encoder, monkeypatch):
    images, _ = bright_quarters(13)
    expected = copy.deepcopy(encoder).eval()((images.float() / 255 - 0.5) / 0.25).detach()
    for batch_size in (1, 5, 500):
        monkeypatch.setattr(features_module, "_IMAGES_AT_A_TIME", {"cpu": batch_size})
        features = extract_features(encoder, images)
        assert features.dtype == torch.float32
        assert not features.requires_grad
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


def test_features_leave_the_encoder_as_it_was(encoder):
    encoder.train()
    encoder[2].eval()  # a frozen BatchNorm inside a model in training
    before = copy.deepcopy(encoder.state_dict())
    random_state = torch.get_rng_state()
    extract_features(encoder, bright_quarters(4)[0])
    with pytest.raises(RuntimeError):
        extract_features(encoder, torch.zeros(2, 1, 5, 5, dtype=torch.uint8))
    modes = [module.training for module in (encoder, *encoder)]
    assert modes == [True, True, True, False, True]
    assert all(torch.equal(before[key], value) for key, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_representations_that_are_not_finite_are_an_error(encoder):
    with torch.no_grad():
        encoder[1].weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"representations: contains NaN.* lower training\.learning_rate"):
        extract_features(encoder, bright_quarters(4)[0])


@pytest.mark.parametrize("labels", ["classes", "several labels an image"])
def test_all_measures_share_the_features_of_one_pass(labels, monkeypatch):
    images, targets = torch.from_numpy(random_pixels(60, 1, 8, 8)), torch.from_numpy(random_pixels(60, 3) % 2)
    classes = torch.arange(60) % 2
    dataset = Dataset("noise", images[:40], classes[:40], images[40:], classes[40:], ("a", "b"), None)
    if labels != "classes":
        dataset = dataclasses.replace(dataset, class_names=(), train_targets=targets[:40], test_targets=targets[40:])
    passes, measures = Mock(wraps=extract_features), []
    monkeypatch.setattr(evaluate, "extract_features", passes)
    for name in ("knn_accuracy", "linear_accuracy", "linear_auroc"):
        measures.append(Mock(wraps=getattr(evaluate, name)))
        monkeypatch.setattr(evaluate, name, measures[-1])
    # in place of a copy on a GPU
    monkeypatch.setattr(evaluate, "measured_on", lambda _, *features: tuple(part.double() for part in features))
    model = Model({"encoder": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))})
    options = EvaluationOptions(neighbors=3, linear={"epochs": 1})
    metrics, _ = evaluate.evaluate_model(model, dataset, options, 0, linear=True)
    assert {"linear", "linear_auroc"} & metrics.keys()
    plain = [call.args for call in passes.call_args_list if len(call.args) == 2]  # views are prepared otherwise
    assert sorted(len(images) for _, images in plain) == [20, 40]
    compared = [part for measure in measures for call in measure.call_args_list for part in call.args[0:3:2]]
    assert {part.dtype for part in compared} == {torch.float64}  # all on the device


def test_features_are_measured_on_a_gpu_that_has_room_for_it(monkeypatch):
    """Two sets of 100 numbers of 4 bytes, and eight times as much to work with; no GPU is needed for fake tensors."""
    for free, device in ((8 * 2 * 400, "cuda"), (8 * 2 * 400 - 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2**40))
        with FakeTensorMode():
            moved = measured_on(torch.device("cuda"), torch.empty(25, 4), torch.empty(25, 4))
        assert [part.device.type for part in moved] == [device, device]


@pytest.mark.parametrize(("side", "expected"), [(32, 500), (64, 500), (224, 40), (4096, 1)])
def test_a_forward_pass_takes_fewer_images_where_they_are_large(side, expected):
    assert features_module.images_at_a_time(torch.zeros(1).expand(9, 3, side, side), 500) == expected
