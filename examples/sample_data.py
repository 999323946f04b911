"""Small real data sets in the on-disk formats of CIFAR-10 and Caltech-101, for runs without a network.

The images come from scikit-learn: handwritten digits in light ink on random crops of two photographs. The classes of
torchvision read them:

    SampleCIFAR10(make_cifar10(root), train=True)  # 1440 images to train, 357 to test; 10 classes; 32 x 32
    Caltech101(make_caltech101(root))              # 1200 images; 12 classes: 10 digits, 2 photographs without digits

Both functions do nothing if the files exist, and never leave incomplete files.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torchvision.datasets import CIFAR10

Pixels = NDArray[np.uint8]  # [height, width, 3]

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PER_BATCH, PER_CATEGORY = 288, 100


class SampleCIFAR10(CIFAR10):  # type: ignore[misc]
    """torchvision's CIFAR10 without the checksums of the original files."""

    train_list: ClassVar[Any] = [[name, None] for name, _ in CIFAR10.train_list]
    test_list: ClassVar[Any] = [[name, None] for name, _ in CIFAR10.test_list]
    meta: ClassVar[Any] = {**CIFAR10.meta, "md5": None}


def make_cifar10(root: Path) -> Path:
    """Write ``root/cifar-10-batches-py`` if it isn't there.

    Returns:
        ``root``, for `SampleCIFAR10`.
    """
    _make_folder(root / CIFAR10.base_folder, _write_cifar10)
    return root


def make_caltech101(root: Path) -> Path:
    """Write ``root/caltech101`` if it isn't there: photographs and digits as JPEG, of many sizes; no annotations.

    Returns:
        ``root``, for torchvision's Caltech101.
    """
    _make_folder(root / "caltech101", _write_caltech101)
    return root


def _write_cifar10(folder: Path) -> None:
    digits, painter = load_digits(), Painter()
    images = np.stack([painter.write(digit, 32, 32) for digit in digits.images])
    # The order of CIFAR-10: all red, all green, all blue values.
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    files = [name for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list)]
    for number, name in enumerate(files):
        end = None if name == files[-1] else (number + 1) * PER_BATCH
        part = slice(number * PER_BATCH, end)
        _pickle({"data": rows[part], "labels": digits.target[part].tolist()}, folder / name)
    _pickle({CIFAR10.meta["key"]: DIGITS}, folder / CIFAR10.meta["filename"])


def _write_caltech101(folder: Path) -> None:
    digits, painter = load_digits(), Painter()
    categories = {"china": 0, "flower": 1, "BACKGROUND_Google": 1} | {name: 2 + n for n, name in enumerate(DIGITS)}
    for name, kind in categories.items():
        (folder / "101_ObjectCategories" / name).mkdir(parents=True)
        for number in range(PER_CATEGORY):
            height, width = painter.random.integers(40, 72, size=2).tolist()
            if kind < 2:
                image = painter.crop(kind, height, width)
            else:
                image = painter.write(digits.images[digits.target == kind - 2][number], height, width)
            path = folder / "101_ObjectCategories" / name / f"image_{number + 1:04d}.jpg"
            Image.fromarray(image).save(path, quality=90)


class Painter:
    """Maker of images [height, width, 3] with a fixed seed: the same calls in the same order give the same images."""

    def __init__(self) -> None:
        self.photographs: list[Pixels] = load_sample_images().images  # china.jpg and flower.jpg, 427 x 640
        self.random = np.random.default_rng(0)

    def crop(self, photograph: int, height: int, width: int) -> Pixels:
        """Return a random part of a photograph."""
        full = self.photographs[photograph]
        top = self.random.integers(full.shape[0] - height)
        left = self.random.integers(full.shape[1] - width)
        return full[top : top + height, left : left + width]

    def write(self, digit: NDArray[np.float64], height: int, width: int) -> Pixels:
        """Return an image [height, width, 3] of a handwritten digit on a darkened part of a photograph.

        Args:
            digit: The amount of ink per pixel, 0..16, [8, 8].
            height: Height of the image in pixels.
            width: Width of the image in pixels.
        """
        scaled = Image.fromarray((digit * (255 / 16)).astype(np.uint8)).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        ink = np.asarray(scaled, dtype=np.float64)[..., None] / 255
        paper = self.crop(int(self.random.integers(2)), height, width) * 0.5
        colour = self.random.uniform(180, 255, size=3)
        return (paper + ink * (colour - paper)).astype(np.uint8)


def _make_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary folder, which gets its final name when it is complete."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        write(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have been faster
                raise


def _pickle(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file)
