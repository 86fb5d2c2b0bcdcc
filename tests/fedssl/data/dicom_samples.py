"""DICOM files, written by tests."""

from pathlib import Path
from typing import Any

import numpy as np


def dataset(elements: dict[str, Any]) -> Any:
    """A data set of elements by name; a list of dictionaries is a sequence, and None leaves an element out."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    made = Dataset()
    for name, value in elements.items():
        if isinstance(value, list) and isinstance(value[0], dict):
            value = Sequence([dataset(item) for item in value])
        if value is not None:
            setattr(made, name, value)
    return made


def write_dicom(path: Path, pixels: np.ndarray, syntax: str = "1.2.840.10008.1.2.1", **elements: Any) -> Path:
    """Write pixels [H, W], [n, H, W] or [H, W, 3]; elements are added, or replace those that the pixels need."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import SecondaryCaptureImageStorage, generate_uid

    colour = pixels.shape[-1] == 3
    frames = pixels.shape[:1] if pixels.ndim == 3 and not colour else ()
    bits = 8 * pixels.itemsize
    rows, columns = pixels.shape[len(frames) : len(frames) + 2]
    needed = {
        "SOPClassUID": SecondaryCaptureImageStorage,
        "SOPInstanceUID": generate_uid(),
        "Rows": rows,
        "Columns": columns,
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "PlanarConfiguration": 0 if colour else None,
        "NumberOfFrames": frames[0] if frames else None,
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "PixelData": pixels.tobytes(),
    }
    stored = dataset(needed | elements)
    stored.file_meta = FileMetaDataset()
    stored.file_meta.TransferSyntaxUID = syntax
    stored.file_meta.MediaStorageSOPClassUID = stored.SOPClassUID
    stored.file_meta.MediaStorageSOPInstanceUID = stored.SOPInstanceUID
    path.parent.mkdir(parents=True, exist_ok=True)
    stored.save_as(path, enforce_file_format=True)
    return path
