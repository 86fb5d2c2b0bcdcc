"""Commands that train one run or a table of runs, and those that evaluate, report and export what was trained."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Table as TextTable
from typer import Argument, Exit, Option

from ..errors import UserError
from ..untrusted import MOST_BYTES, printable, quoted, read_regular_file
from .console import OptionalRecipeName, Overrides, Trust, console, print_next, print_text

if TYPE_CHECKING:
    from ..data.datasets import Dataset
    from ..data.options import DataOptions
    from ..federation import Federation
    from ..recipe.recipe import Recipe
    from ..run_folder.record import Run

#: the recipe of `fedssl pretrain`
_PRETRAINING = "centralised_simclr"
#: the network of `fedssl pretrain` where time is short, and for images of how many pixels a side it was measured
_SMALL_NETWORK, _LARGEST_SIDE = "small_convnet_512", 128
RunFolder = Annotated[Path | None, Option(help="Folder of the run; runs/NAME-seedN by default.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the run in the folder if there is one.")]
Minutes = Annotated[
    float | None,
    Option(
        min=0.1,
        help="Let the run take about so long: some timed steps decide its number of rounds before it begins.",
    ),
]
EncoderFolder = Annotated[
    Path | None,
    Option(metavar="FOLDER", help="Export the encoder at the end, the best round's if one is kept, into this folder."),
]


def run(
    recipe: OptionalRecipeName = None,
    overrides: Overrides = None,
    output: RunFolder = None,
    resume: Annotated[
        Path | None,
        Option(help="Continue the run in this folder; with rounds=N a finished one too (docs/operations.md)."),
    ] = None,
    from_round: Annotated[
        int | None,
        Option(min=0, help="With --resume: go back to this round, one of the last `checkpoints` of the recipe."),
    ] = None,
    minutes: Minutes = None,
    overwrite: Overwrite = False,
    observer: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE", help="Python file with a fedssl.Observer, such as a logger, to call each round; repeatable."
        ),
    ] = None,
    encoder: EncoderFolder = None,
    trust: Trust = False,
) -> None:
    """Run a recipe, or continue a run (fedssl run --resume RUN), also with more rounds (rounds=N)."""
    began = time.perf_counter()
    from ..engines import engine_of
    from ..engines.observers import Observers, load_observer
    from ..engines.pace import require_equal_rounds
    from ..engines.progress import ProgressBars
    from ..evaluation.verdict import verdict
    from ..recipe.reading import load_recipe, load_stored_recipe
    from ..run_folder.creation import default_folder
    from ..run_folder.directory import RunDirectory
    from ..run_folder.record import read_run
    from ..run_folder.storage import require_new_folder

    if from_round is not None and resume is None:
        raise UserError("--from-round goes back to a round of a run that is there: name it with --resume RUN")
    if encoder is not None:
        require_new_folder(encoder)
    observers = [load_observer(file) for file in observer or ()]
    changes: list[str] = []
    if resume is not None:
        if output or overwrite or minutes:
            raise UserError(
                "--resume takes neither --output nor --overwrite nor --minutes: the run continues in its own folder, "
                "and its recipe holds its rounds (rounds=N adds more)"
            )
        path, changes = resume, [*([recipe] if recipe else []), *(overrides or ())]
        loaded = load_stored_recipe(RunDirectory.open(path), trust, resuming=True)
    else:
        if recipe is None:
            raise UserError("name a recipe (fedssl recipes lists them) or give --resume RUN")
        loaded = load_recipe(recipe, overrides or (), trust=trust)
        path = output or default_folder(loaded.name, loaded.seed)
        if (preset := loaded.preset) != "none":
            print_text(f"Preset {preset} fills in what the recipe leaves open; `fedssl show` tells what and why.")
    if encoder is not None and path.resolve().is_relative_to(encoder.resolve()):
        raise UserError(f"--encoder {quoted(encoder)} is the run's folder or one above it: name a folder elsewhere")
    if encoder is not None and loaded.local_update.personal and loaded.partition.clients > 1:
        raise UserError(
            "--encoder needs a global model or a single client, but each client of this recipe keeps its own model: "
            f"run it without, then choose one with fedssl export {quoted(path)} FOLDER --client NUMBER"
        )
    if minutes is not None:
        if not math.isfinite(minutes):
            raise UserError(f"--minutes: expected a number of minutes, got {minutes}")
        if any(override.startswith("rounds=") for override in overrides or ()):
            raise UserError("--minutes chooses the number of rounds: leave out --minutes or rounds=N")
        if loaded.engine != "in-process":
            raise UserError(f"--minutes is for engine in-process, got engine {loaded.engine}: give rounds=N")
        require_equal_rounds(loaded)
    replaced = path.stat().st_ino if overwrite and path.exists() else None  # the new run has a folder of its own
    try:
        with ProgressBars(console) as bars:
            if resume is not None:
                directory = engine_of(loaded).resume(path, Observers([bars, *observers]), trust, changes, from_round)
            else:
                timed = (
                    {"before": partial(_timed, minutes=minutes, began=began)} if loaded.engine == "in-process" else {}
                )
                directory = engine_of(loaded).run(loaded, path, Observers([bars, *observers]), overwrite, **timed)
    except KeyboardInterrupt:
        if (path / "recipe.yaml").is_file() and path.stat().st_ino != replaced:
            words = ["fedssl", "run", "--resume", str(path), *changes, *(["--trust"] if trust else [])]
            words += [word for file in observer or () for word in ("--observer", str(file))]
            words += ["--encoder", str(encoder)] if encoder is not None else []
            print_text(f"\nStopped. The last complete round is kept; continue with: {shlex.join(words)}")
        else:
            print_text("\nStopped before the run began; nothing was written.")
        raise Exit(130) from None
    recorded = read_run(path)
    _print_final_evaluation(recorded)
    for sentence in verdict(recorded):
        print_text(sentence)
    print_text(f"The run is in {path}")
    if (kept := directory.checkpoint.best) is not None:
        found = f"round {kept.round}, {kept.value:.1f} % of views find their image"
        print_text(f"The best models are kept ({found}): fedssl export {quoted(path)} FOLDER --best")
    if encoder is not None:
        export(path, encoder, best=kept is not None, trust=trust or resume is None)
    else:
        print_next("report", path)


def _timed(federation: Federation, minutes: float | None, began: float) -> Federation:
    """Return the federation for so many minutes, or the same, and print about how long its run takes, if it is long."""
    from ..engines.pace import told_duration, within

    if minutes is not None:
        federation = within(federation, minutes, began)
        rounds = f"{federation.recipe.rounds} round{'s' * (federation.recipe.rounds > 1)}"
        print_text(f"{minutes:g} minutes hold {rounds} on this machine, by steps that were timed.")
        return federation
    with suppress(Exception):  # what fails on a few images may do on all, and if not, the run says why
        if told := told_duration(federation):
            print_text(told)
    return federation


def pretrain(
    words: Annotated[
        list[str],
        Argument(
            metavar="IMAGES... [KEY=VALUE...]",
            help="Folders of images, or one .npz or .npy file; then settings to change.",
        ),
    ],
    encoder: EncoderFolder = None,
    minutes: Minutes = None,
    output: RunFolder = None,
    overwrite: Overwrite = False,
) -> None:
    """Train an encoder on images of your own, all in one place, without labels.

    It runs the recipe centralised_simclr on them, and prints the `fedssl run` that does the same.
    """
    settings = [word for word in words if "=" in word and not os.path.exists(word)]  # one may be too long for a name
    first, *more = [word for word in words if word not in settings] or [""]
    if not first:
        raise UserError("name a folder of images, such as: fedssl pretrain my_images --encoder encoder")
    as_read = printable(first) == first.strip().strip("\"'~") and first.lower() != "null"  # without quotes around it
    path = first if as_read else json.dumps(first, ensure_ascii=False)
    data = [f"data.name={'npz' if first.endswith(('.npz', '.npy')) else 'images'}", f"data.path={path}"]
    if more:
        data.append(f"data.more_paths={json.dumps(more, ensure_ascii=False)}")
    options = {"--encoder": encoder, "--minutes": minutes, "--output": output}
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    try:
        settings += _timed_choices([*data, *settings], minutes, output, overwrite)
    except KeyboardInterrupt:
        print_text("\nStopped before the run began; nothing was written.")
        raise Exit(130) from None
    same = ["fedssl", "run", _PRETRAINING, *data, *settings, *given, *(["--overwrite"] if overwrite else [])]
    print_text(f"The same as: {shlex.join(same)}")
    run(_PRETRAINING, [*data, *settings], output, minutes=minutes, overwrite=overwrite, encoder=encoder)


def _timed_choices(settings: Sequence[str], minutes: float | None, output: Path | None, overwrite: bool) -> list[str]:
    """Return settings with which this machine trains on more images, by timed steps, and print them.

    The precision is bfloat16 where a step in it takes four fifths of float32's time or less. The network is a small one
    where the preset's would see images of at most 128 pixels too rarely in that time.
    """
    from ..evaluation.verdict import too_short
    from ..recipe.reading import load_recipe
    from ..run_folder.creation import default_folder, refuse_existing
    from ..tables.dry_run import training_data

    chosen: list[str] = []
    with ExitStack() as quiet, suppress(Exception):  # what fails here fails in the run, which says why
        logging.disable(logging.WARNING)  # the run warns of the same
        quiet.callback(logging.disable, logging.NOTSET)
        recipe = load_recipe(_PRETRAINING, settings)
        refuse_existing(output or default_folder(recipe.name, recipe.seed), overwrite)
        data = training_data(recipe.data, recipe.seed, None)
        assert data is not None
        images, side = len(data.train_images), max(data.train_images.shape[2:])
        (network,) = recipe.architectures
        step, precision = _step_seconds(recipe, data, settings)

        def passes(step: float) -> float:
            return 60 * (minutes or math.inf) / step * recipe.training.batch_size / images

        as_long = recipe.model_dump() | {"rounds": passes(step)}
        as_long["training"] |= {"local_epochs": 1, "local_steps": None}
        given = any(setting.startswith(("architectures", "rounds")) for setting in settings)
        if not given and network != _SMALL_NETWORK and side <= _LARGEST_SIDE and too_short(as_long, images):
            small = load_recipe(_PRETRAINING, [*settings, f"architectures=[{_SMALL_NETWORK}]"])
            faster, precision = _step_seconds(small, data, settings)
            print_text(
                f"With --minutes {minutes:g} {network} would see each image {passes(step):.3g} times, which is too "
                f"rarely. The network is {_SMALL_NETWORK}, which sees it {passes(faster):.3g} times; "
                f"architectures=[{network}] keeps the other."
            )
            chosen.append(f"architectures=[{_SMALL_NETWORK}]")
        if precision:
            print_text("training.precision is bfloat16, in which steps are faster on this machine.")
            chosen.append(f"training.precision={precision}")
    return chosen


def _step_seconds(recipe: Recipe, data: Dataset, settings: Sequence[str]) -> tuple[float, str | None]:
    """Return the seconds of a step, and bfloat16 if it is not given and takes four fifths of the time or less."""
    from ..engines.pace import SECONDS, measure_pace
    from ..federation import build_federation
    from ..models.precision import has_bfloat16

    def timed(recipe: Recipe) -> float:
        return measure_pace(build_federation(recipe, data), SECONDS).step

    step = timed(recipe)
    if has_bfloat16() and not any(setting.startswith("training") and "precision" in setting for setting in settings):
        training = recipe.training.model_copy(update={"precision": "bfloat16"})
        if (faster := timed(recipe.model_copy(update={"training": training}))) <= 0.8 * step:
            return faster, "bfloat16"
    return step, None


def run_table(
    table: Annotated[str, Argument(metavar="TABLE", help="Name of a shipped table, or path of a .yaml file.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, Option(help="Folder of the table; runs/TABLE by default.")] = None,
    jobs: Annotated[int, Option(min=1, help="How many cells run at a time, each in its own process.")] = 1,
    dry: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Only list the runs, their cost in FLOPs and in hours on this machine, and the paper's figures.",
        ),
    ] = False,
    part: Annotated[
        tuple[int, int], Option(min=1, metavar="K N", help="Run the K-th of N parts, to divide a table among machines.")
    ] = (1, 1),
    trust: Trust = False,
) -> None:
    """Run every recipe of a table with every seed, and write the table.

    The same command continues an interrupted table; finished cells are kept. A row that sets its partition, such as
    one place, keeps it. A table with the key `sweep` first chooses the options of its rows.
    """
    from ..tables.sweep import run_sweep, trials_of
    from ..tables.table import load_table

    loaded = load_table(table, trust)
    path = output or Path("runs") / loaded.name
    if dry:
        from ..tables.dry_run import dry_run

        changes = overrides or ()
        dry_run(trials_of(loaded, trust, changes) if loaded.sweep else loaded, changes, note=print_text)
        folder = ["--output", str(output)] if output else []
        print_next("sweep" if loaded.sweep else "run-table", table, *folder, overrides=overrides, trust=trust)
        return
    try:
        run_sweep(loaded, path, overrides or (), jobs, print_text, part, trust)
    except KeyboardInterrupt:
        console.print("\nStopped. Finished cells and rounds are kept; the same command continues.")
        raise Exit(130) from None
    runs = sorted(path.rglob("recipe.yaml"), key=lambda file: (path / "trials" in file.parents, file))  # winners first
    print_next("report", runs[0].parent if runs else path)


def _print_final_evaluation(run: Run) -> None:
    """Print the last evaluation, one line for each client, below those of raw pixels and of the start."""
    from ..evaluation.metrics import METRICS, short_title

    if not run.values:
        return
    values = {(who, name): value for (number, who, name), value in run.values.items() if number == run.last_round}
    measured = {name for _, name in values}
    labelled = not measured & {"alignment", "uniformity"}
    metrics = [m for m in METRICS.values() if m.printed and m.images != ("unlabelled" if labelled else "labelled")]
    shown = [m for m in metrics if labelled or m.name in measured]
    start = {name: value for (number, who, name), value in run.values.items() if number == 0 and not who.isdigit()}
    lines = {"raw pixels": {name.removeprefix("pixel_"): start[name] for name in start if name.startswith("pixel_")}}
    lines["before training"] = start
    owners = {who: who for who, name in values if any(name == m.name for m in shown)}
    if list(owners) == ["0", "mean"]:  # a single client, as where images lie in one place
        owners = {"0": "after training"}
    for who, label in owners.items():
        lines[label] = {name: value for (owner, name), value in values.items() if owner == who}
    table = TextTable("client", *(short_title(m.name) for m in shown), box=None, pad_edge=False)
    for who, found in lines.items():
        if found:
            table.add_row(who, *(f"{found[m.name]:.{m.decimals}f}" if m.name in found else "-" for m in shown))
    console.print(table)


def evaluate(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Folder of a run, or one that `fedssl export` has written.")
    ],
    data: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE,...",
            help="Evaluate on other data: keys of a recipe's data, such as name=npz,path=mine.npz; repeatable.",
        ),
    ] = None,
    fractions: Annotated[
        list[float] | None,
        Option(
            "--semi-supervised", help="Also fine-tune on this fraction of the labels, above 0 and up to 1; repeatable."
        ),
    ] = None,
    fine_tune: Annotated[
        Literal["train", "validation"] | None,
        Option(help="Also fine-tune on all labels of these images, for macro precision, recall and F1."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Evaluate a run's last checkpoint or an exported encoder: kNN and linear accuracy, and fine-tuning on request."""
    from ..evaluation.fine_tuning import FineTuneOptions
    from ..export.encoder_folder import is_encoder_folder
    from ..reports.evaluation import parse_data, write_evaluation

    options = FineTuneOptions(images=fine_tune) if fine_tune else None
    others: list[DataOptions | None] = [parse_data(text) for text in data or []] or [None]
    measure = partial(write_evaluation, folder, fractions or [], print_text, options, trust=trust)
    for path in dict.fromkeys([measure(data=other) for other in others]):
        print_text(path.read_text(encoding="utf-8").rstrip())
        print_text(f"The table is in {path}")
    if is_encoder_folder(folder):
        print_next("embed", folder, "my_images", "--output", "features.npz")
    else:
        _print_next_of_run(folder)


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of one or more runs.")],
    output: Annotated[
        Path | None, Option(help="File to write; RUN/report.html by default, or report.html for several runs.")
    ] = None,
    images: Annotated[
        bool, Option(help="Also show images of the data as the encoder sees them; the page then holds these images.")
    ] = True,
    show: Annotated[bool, Option("--open", help="Also open the page in the browser.")] = False,
    trust: Trust = False,
) -> None:
    """Write an HTML page with curves, tables, the partition and pictures of the representations."""
    from ..reports.report import write_report

    page = write_report(runs, output, images=images, trust=trust)
    print_text(f"The report is in {page}")
    if show and not webbrowser.open(page.resolve().as_uri()):
        print_text("No browser could be opened here; open the page yourself, if need be on another machine.")
    _print_next_of_run(runs[0])


def _print_next_of_run(path: Path) -> None:
    """Print what to do with a run that was measured: use its encoder, export it, or continue the run."""
    from ..evaluation.metrics import is_measure
    from ..export.encoder_folder import is_encoder_folder
    from ..run_folder.directory import EXPORTED
    from ..run_folder.record import read_run

    with suppress(OSError, ValueError):  # none was exported, or it has gone
        encoder = Path(os.fsdecode(read_regular_file(path / EXPORTED, MOST_BYTES)))
        if is_encoder_folder(encoder):
            print_next("embed", encoder, _images_of(path), "--output", "features.npz")
            return
    recorded = read_run(path)
    if not recorded.finished and recorded.recipe.get("engine") != "flower":
        print_next("run", "--resume", path, *["evaluation.patience=null"] * recorded.out_of_patience)
        return
    shared = any(who == "global" and is_measure(metric) for _, who, metric in recorded.values)
    print_next("export", path, "encoder", *([] if shared or len(recorded.class_counts) == 1 else ["--client", "0"]))


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")],
    output: Annotated[Path, Argument(metavar="FOLDER", help="Folder to make; it must not exist or be empty.")],
    client: Annotated[
        int | None,
        Option(help="Export this client's own model, right after its last training, and not the global one."),
    ] = None,
    best: Annotated[
        bool, Option("--best", help="The best round's (evaluation.keep_best) in place of the last.")
    ] = False,
    onnx: Annotated[bool, Option("--onnx", help="Also write encoder.onnx.")] = False,
    trust: Trust = False,
) -> None:
    """Export a run's encoder as a folder that timm, or a load.py with torch and timm alone, loads."""
    from ..export.encoder_folder import export_encoder
    from ..run_folder.directory import EXPORTED
    from ..run_folder.storage import write_atomically

    path = export_encoder(run, output, client, onnx, trust, best)
    shape = ", ".join(map(str, json.loads((path / "config.json").read_text())["fedssl"]["image_shape"]))
    print_text(f"The encoder is in {path}; README.md there says more. In Python, with torch and timm alone:")
    print_text(
        f"    import sys, torch\n    sys.path.insert(0, {str(path.resolve())!r})\n"
        f"    from load import load_encoder, normalize\n"
        f"    print(load_encoder()(normalize(torch.zeros(1, {shape}, dtype=torch.uint8))).shape)"
    )
    with suppress(UserError):  # of somebody else's run
        write_atomically(run / EXPORTED, os.fsencode(path.absolute()))
    print_next("embed", output, _images_of(run), "--output", "features.npz")


def _images_of(run: Path) -> str:
    """Return the folder or file of a run's own images; a name to replace where the images ship with a library."""
    from ..run_folder.record import read_run

    data = read_run(run).recipe.get("data")
    source = data.get("path") if isinstance(data, dict) and data.get("name") in ("images", "folder", "npz") else None
    return str(source or "my_images")


def embed(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder that `fedssl export` has written.")],
    images: Annotated[
        list[Path], Argument(metavar="IMAGES...", help="Folders of images, nested or flat, or .npz or .npy files.")
    ],
    output: Annotated[
        Path,
        Option(help="File to write: .npz with the arrays `features` and `files`, or .csv with file, feature_0, ..."),
    ] = Path("features.npz"),
    patches: Annotated[
        bool, Option("--patches", help="Write the features of each patch before they are pooled: n x H' x W' x d.")
    ] = False,
    window: Annotated[
        str | None,
        Option(help="LOW,HIGH, full, per_image or file: how deeper pixels become 8 bits; by default as in the run."),
    ] = None,
    skip_broken: Annotated[
        bool, Option("--skip-broken", help="Leave out files that cannot be read, and name them.")
    ] = False,
    follow_links: Annotated[
        bool, Option("--follow-links", help="Also read what links in IMAGES lead to outside them.")
    ] = False,
) -> None:
    """Write the representations of images, with the images' names, by an exported encoder."""
    from rich.progress import Progress

    from ..data.pixels import parse_window
    from ..export.embed import embed_images

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=None)
        left_out = embed_images(
            folder,
            images,
            output,
            patches=patches,
            window=None if window is None else parse_window(window),
            skip_broken=skip_broken,
            follow_links=follow_links,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if left_out:
        print_text(f"Left out: {left_out}")
    reader = "pandas.read_csv" if output.suffix == ".csv" else "numpy.load"
    print_text(f"The features are in {output}; read them with {reader}({str(output)!r})")
