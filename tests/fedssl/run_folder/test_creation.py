"""A new run's folder: what may be replaced, by whom, and that nothing else is ever deleted."""

import os
from pathlib import Path

import pytest

from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.run_folder import creation
from fedssl.run_folder.creation import alone_in, refuse_existing
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.engines.short_runs import everything

FILES = {"recipe.yaml": "name: a\n"}


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_run_is_neither_replaced_nor_deleted(overwrite, tiny, tmp_path, monkeypatch):
    """A folder of the user's with another one inside it, a file, a link and a pipe."""
    (tmp_path / "thesis" / "chapters").mkdir(parents=True)
    (tmp_path / "thesis" / "chapters" / "one.tex").write_text("years of work")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("thesis")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path / "thesis")
    before = everything(tmp_path)
    for output in (".", "..", "chapters", "../thesis", "../file", "../link", "../pipe"):
        with pytest.raises(UserError, match=r"^[^\n]*exists and is not the folder of a run.*name another --output$"):
            in_process.run(tiny(), Path(output), overwrite=overwrite)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("kept", ["recipe.yaml", "checkpoints/manifest.json", "a link to checkpoints"])
def test_half_of_a_run_is_not_replaced(kept, tmp_path):
    if kept == "a link to checkpoints":
        RunDirectory.create(tmp_path / "a", FILES)
        os.rename(tmp_path / "a" / "checkpoints", tmp_path / "elsewhere")
        (tmp_path / "a" / "checkpoints").symlink_to("../elsewhere")
    else:
        (tmp_path / "a" / kept).parent.mkdir(parents=True)
        (tmp_path / "a" / kept).write_text("{}")
    with pytest.raises(UserError, match="is not the folder of a run"):
        refuse_existing(tmp_path / "a", overwrite=True)


def test_a_run_is_replaced_only_where_asked(tmp_path):
    """A folder with a space is one word of the advised command."""
    path = tmp_path / "a run"
    RunDirectory.create(path, FILES)
    (path / "report.html").write_text("")
    with pytest.raises(UserError, match=f"exists: continue it with fedssl run --resume '{path}', or give --overwrite"):
        RunDirectory.create(path, {"recipe.yaml": "name: b\n"})
    RunDirectory.create(path, {"recipe.yaml": "name: b\n"}, overwrite=True)
    assert (path / "recipe.yaml").read_text() == "name: b\n"
    assert {file.name for file in path.iterdir()} == {"recipe.yaml", "checkpoints"}
    assert [folder.name for folder in tmp_path.iterdir()] == ["a run"]


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    RunDirectory.create(tmp_path / "a", FILES)
    for inside in (tmp_path / "a", tmp_path / "a" / "checkpoints"):
        monkeypatch.chdir(inside)
        with pytest.raises(UserError, match="is the working folder or one above it"):
            refuse_existing(tmp_path / "a", overwrite=True)


def test_a_run_that_begins_while_another_is_prepared_is_not_replaced(tmp_path, monkeypatch):
    RunDirectory.create(tmp_path / "a", FILES)
    real, begun = creation.write_manifest, alone_in(tmp_path / "a")
    monkeypatch.setattr(creation, "write_manifest", lambda *arguments: (begun.__enter__(), real(*arguments)))
    with pytest.raises(UserError, match="another process is at work on this run"):
        RunDirectory.create(tmp_path / "a", {"recipe.yaml": "name: b\n"}, overwrite=True)
    begun.__exit__(None, None, None)
    assert (tmp_path / "a" / "recipe.yaml").read_text() == "name: a\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_lock_holds_for_the_folder_that_has_the_name(tmp_path):
    """Who waited while the folder was replaced would otherwise work on the one that is gone."""
    (tmp_path / "a").mkdir()
    real = os.open

    def replaced_meanwhile(path, *arguments):
        handle = real(path, *arguments)
        os.rename(tmp_path / "a", tmp_path / "old")
        (tmp_path / "a").mkdir()
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.open", replaced_meanwhile)
        with pytest.raises(UserError, match="another process"), alone_in(tmp_path / "a"):
            pass
