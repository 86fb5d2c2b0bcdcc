"""DICOM files through a stated window or their own."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import refused, save
from tests.fedssl.data.dicom_samples import write_dicom
from tests.fedssl.data.image_samples import ramp, save_array

pytest.importorskip("pydicom", reason="pydicom is not installed: pip install .[dicom]")


def options_of(tmp_path: Path, **options: object) -> DataOptions:
    return DataOptions(name="images", path=tmp_path, image_size=16, **options)


def first(options: DataOptions) -> np.ndarray:
    images = load_dataset(options, 0).train_images
    assert images.shape[1] == 1
    return images[0, 0].numpy()


def test_a_window_is_in_the_units_of_the_file(tmp_path):
    """A computed tomography: stored values 0 to 3000 stand for -1000 to 2000 Hounsfield units."""
    stored = ramp(0, 3000, "u2")
    write_dicom(tmp_path / "a.dcm", stored, RescaleSlope=1, RescaleIntercept=-1000, BitsStored=12, HighBit=11)
    says = r"a\.dcm has pixels of more than 8 bits, .*values -1000 to 2000 .*data\.window=\[-1000,2000\]"
    refused(says, options_of(tmp_path))
    lung = first(options_of(tmp_path, window=(-1000, 200)))
    assert np.array_equal(lung, np.rint(np.clip(stored.astype(float) / 1200, 0, 1) * 255))
    full = first(options_of(tmp_path, window="full"))
    assert np.array_equal(full, np.rint(stored.astype(float) / 4095 * 255))
    assert first(options_of(tmp_path, window="per_image")).max() == 255


def test_the_window_of_the_file(tmp_path):
    stored = ramp(0, 1000, "u2")
    write_dicom(tmp_path / "a.dcm", stored, WindowCenter=[400, 9], WindowWidth=[201, 9])
    refused(r"or data\.window=file \(what each DICOM file names\)", options_of(tmp_path))
    # DICOM PS3.3, C.11.2.1.2.1: the window reaches from c - 0.5 - (w - 1) / 2 to c - 0.5 + (w - 1) / 2
    expected = np.rint(np.clip((stored.astype(float) - 299.5) / 200, 0, 1) * 255)
    assert np.array_equal(first(options_of(tmp_path, window="file")), expected)
    write_dicom(tmp_path / "a.dcm", stored, WindowCenter=400, WindowWidth=200, VOILUTFunction="LINEAR_EXACT")
    expected = np.rint(np.clip((stored.astype(float) - 300) / 200, 0, 1) * 255)
    assert np.array_equal(first(options_of(tmp_path, window="file")), expected)
    write_dicom(tmp_path / "b.dcm", stored)
    refused(r"b\.dcm names no window of its own, as 1 of 2 files", options_of(tmp_path, window="file"))


def test_inverted_and_shallow_and_coloured_files(tmp_path):
    gray = ramp(0, 255, "u1")
    write_dicom(tmp_path / "plain" / "a.dcm", gray)
    assert np.array_equal(first(options_of(tmp_path / "plain")), gray)
    write_dicom(tmp_path / "inverted" / "a.dcm", gray, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(first(options_of(tmp_path / "inverted")), 255 - gray)
    write_dicom(tmp_path / "deep" / "a.dcm", ramp(0, 4000, "u2"), PhotometricInterpretation="MONOCHROME1")
    assert first(options_of(tmp_path / "deep", window=(0, 4000)))[0, [0, -1]].tolist() == [255, 0]
    colour = np.zeros((16, 16, 3), np.uint8)
    colour[:] = (200, 100, 50)
    write_dicom(tmp_path / "colour" / "a.DCM", colour)
    images = load_dataset(options_of(tmp_path / "colour"), 0).train_images
    assert images[0, :, 5, 5].tolist() == [200, 100, 50]


def test_the_first_of_several_frames(tmp_path, caplog):
    write_dicom(tmp_path / "a.dcm", np.stack([ramp(0, 255, "u1"), ramp(255, 0, "u1")]))
    assert np.array_equal(first(options_of(tmp_path)), ramp(0, 255, "u1"))
    assert "1 file holds several images" in caplog.text


def test_broken_dicom_files_are_named(tmp_path):
    whole = write_dicom(tmp_path / "a.dcm", ramp(0, 255, "u1")).read_bytes()
    for name, content in (("cut", whole[:-20]), ("header", whole[:200]), ("text", b"not DICOM"), ("empty", b"")):
        (tmp_path / f"{name}.dcm").write_bytes(content)
    refused(
        r"^4 of 5 files cannot be read as images: .*cut\.dcm .*empty\.dcm \(the file is empty\)", options_of(tmp_path)
    )
    assert len(load_dataset(options_of(tmp_path, broken="skip"), 0).train_images) == 1


def test_without_pydicom_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_dicom(tmp_path / "a.dcm", ramp(0, 255, "u1"))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    refused(r"a\.dcm is a DICOM file, which needs pydicom: pip install", options_of(tmp_path))
    refused(r"needs pydicom", options_of(tmp_path, broken="skip"))


def test_other_files_have_no_window_of_their_own(tmp_path):
    save_array(tmp_path / "a.png", ramp(0, 4000, "u2"))
    refused(r"a\.png names no window of its own", options_of(tmp_path, window="file"))
    path = save(tmp_path / "p.npz", x=ramp(0, 4000, "u2")[None])
    refused(r"x in .* names no window of its own", DataOptions(name="npz", path=path, window="file"))


def test_a_dicom_file_needs_no_suffix(tmp_path, caplog):
    """As on a disc: IM_0001, or an identifier with dots; the list of its files is no image, and not broken."""
    content = write_dicom(tmp_path / "a.dcm", ramp(0, 255, "u1")).read_bytes()
    for name in ("IM_0001", "1.2.840.113619.2.55", "a.IMA", "DICOMDIR", "misnamed.jpg"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes").write_bytes(b"\0" * 200)
    images = load_dataset(options_of(tmp_path), 0).train_images
    assert images.shape == (5, 1, 16, 16)
    assert (images == images[0]).all()
    assert "2 files are left out of" in caplog.text
    assert "DICOMDIR, notes; images end with" in caplog.text
