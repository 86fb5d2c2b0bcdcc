"""``python -m benchmarks.own_images``: what is read from both sides' outputs, and what the page says of it."""

import json
import sys

import numpy as np
import pytest

from benchmarks import own_images
from benchmarks.own_images import CASES, OURS, THEIRS, accuracies, images_a_second, measured, page

BAR = "Epoch {0}: 100%|####| 40/40 [00:38<00:00,  {1}, train_loss=4.860]"


def test_the_rate_is_the_last_rounds_or_the_median_epochs():
    assert images_a_second(OURS, "round 0/1\nround 1/1  loss 4.065  3,667 images/s\n") == 3667
    epochs = "\r".join(
        ["Epoch 0:  50%|##  | 20/40 [00:20<00:20,  9.99it/s]", BAR.format(0, "1.00it/s"), BAR.format(1, "2.00s/it")]
    )
    assert images_a_second(THEIRS, epochs) == 0.75 * own_images.BATCH_SIZE


def test_both_sides_take_the_same_minutes(monkeypatch, tmp_path):
    case = own_images.Case(32, "small_convnet_512", 1280, 0, "float32", 1.0, 1.0, 2.0)
    output = "\r".join([BAR.format(0, "1.00it/s"), BAR.format(1, "1.00it/s")])
    commands = []  # ten seconds an epoch, six to start
    monkeypatch.setattr(own_images, "measured", lambda command, _: commands.append(command) or (26.0, 0, output))
    assert own_images.with_epochs("python", case, tmp_path, tmp_path, 0, 1).epochs == 11
    timed, trained = commands[0], own_images.peer_command("python", case, tmp_path, tmp_path, 0, "train")
    assert json.loads(timed[-1])["run"] != json.loads(trained[-1])["run"]  # LightlyTrain refuses a folder with files
    assert case.name == "32 pixels, small_convnet_512, 2 minutes"
    command = own_images.own_command(case, tmp_path, tmp_path, 0)
    assert command[3] == "pretrain"
    assert command[command.index("--minutes") + 1] == "2.0"


def test_a_command_that_fails_is_named_with_what_it_said():
    seconds, memory, output = measured([sys.executable, "-c", "print('done'); import time; time.sleep(1.2)"], 1)
    assert 1.2 < seconds < 60
    assert 2**20 < memory < 2**32
    assert output == "done\n"
    with pytest.raises(SystemExit, match=r"ended with 3:\nlost"):
        measured([sys.executable, "-c", "print('lost'); raise SystemExit(3)"], 1)


def test_accuracies_are_of_the_last_rows():
    labels = np.arange(140) % 2
    features = np.stack([np.where(labels, 1.0, -1.0), np.ones(140)], axis=1)
    assert accuracies(features, labels, 40) == (100.0, 100.0)
    labels[-20:] = 1 - labels[-20:]
    assert accuracies(features, labels, 40) == (50.0, 50.0)


def test_the_page_judges_each_bar():
    ours = {"seconds": 20.0, "rate": 125.0, "memory": 2**30, "knn": 40.0, "linear": 50.0}
    theirs = {"seconds": 40.0, "rate": 100.0, "memory": 2**31, "knn": 41.0, "linear": 48.5}
    runs = {OURS: [ours | {"linear": 45.0}, ours, ours | {"linear": 51.0}], THEIRS: [theirs] * 3}
    row = {"case": vars(CASES[0]), "name": CASES[0].name, "runs": runs}
    text = page({"environment": {"threads": 2}, "rows": [row]})
    assert "| 2.00 (bar 1.5: met) | 1.25 (bar 1.3: missed) | -1.0 | +0.2 |" in text
    assert "| fedssl | 20.0 (20.0 to 20.0) | 125 | 1024 | 40.0 ± 0.0 | 48.7 ± 3.2 |" in text  # mean, sample deviation
    assert "| LightlyTrain | 40.0 (40.0 to 40.0) | 100 | 2048 | 41.0 ± 0.0 | 48.5 ± 0.0 |" in text
