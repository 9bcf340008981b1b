"""Pictures of shapes under noise: a data set that is drawn, not downloaded."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CLASSES = ("disc", "square", "cross", "ring")

Batch = tuple[Tensor, Tensor]


class Shapes(Dataset[Batch]):
    """Grey pictures of one shape each; a picture follows from its number and the seed."""

    def __init__(self, num_images: int, *, size: int = 16, noise: float = 0.3, seed: int = 0) -> None:
        """size: height and width in pixels. noise: standard deviation; the shape is 1 on a ground of 0."""
        self.num_images, self.size, self.noise, self.seed = num_images, size, noise, seed

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> Batch:
        """Returns the picture, [1, size, size], and its class."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % len(CLASSES)
        centre_y, centre_x, scale = torch.rand(3, generator=generator).tolist()
        radius = self.size * (0.2 + 0.1 * scale)
        reach = self.size - 2 * radius
        grid = torch.arange(self.size, dtype=torch.float32)
        y, x = (grid - radius - reach * centre_y)[:, None], (grid - radius - reach * centre_x)[None, :]
        picture = _inside(CLASSES[label], y, x, radius).float()
        picture += self.noise * torch.randn(self.size, self.size, generator=generator)
        return picture[None], torch.tensor(label)


def _inside(shape: str, y: Tensor, x: Tensor, radius: float) -> Tensor:
    """Which pixels, at distances y and x from the centre, belong to a shape."""
    distance = (y.square() + x.square()).sqrt()
    widest, narrowest = torch.maximum(y.abs(), x.abs()), torch.minimum(y.abs(), x.abs())
    if shape == "disc":
        return distance <= radius
    if shape == "square":
        return widest <= 0.8 * radius
    if shape == "cross":
        return (widest <= radius) & (narrowest <= 0.3 * radius)
    return (distance <= radius) & (distance >= 0.6 * radius)


class ShapesDataModule(L.LightningDataModule):
    """Pictures to train on, to validate and to test."""

    def __init__(
        self,
        num_train: int = 2048,
        num_val: int = 512,
        num_test: int = 512,
        size: int = 16,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        """num_train, num_val, num_test: pictures of each split. size: height and width of a picture.
        batch_size, num_workers: of the loaders."""
        super().__init__()
        self.counts = {"train": num_train, "val": num_val, "test": num_test}
        self.size, self.batch_size, self.num_workers = size, batch_size, num_workers

    def setup(self, stage: str) -> None:
        """Splits differ by their seed."""
        self.splits = {
            name: Shapes(count, size=self.size, seed=seed) for seed, (name, count) in enumerate(self.counts.items())
        }

    def train_dataloader(self) -> DataLoader[Batch]:
        """In another order each epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """In their own order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        """In their own order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The pictures of the test."""
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader[Batch]:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            shuffle=shuffle,
        )
