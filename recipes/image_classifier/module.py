"""A convolutional network, its accuracy by torchmetrics, and its training, as Lightning's documentation writes them."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy


class ImageClassifier(L.LightningModule):
    """Trains a small convolutional network on pictures and their classes."""

    def __init__(
        self, num_classes: int = 4, channels: int = 8, learning_rate: float = 5e-3, decay: float = 0.9
    ) -> None:
        """channels: of the first layer; the second has twice as many. decay: of the learning rate in each epoch."""
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.decay = learning_rate, decay
        self.net = nn.Sequential(
            *_layer(1, channels),
            *_layer(channels, 2 * channels),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * channels, num_classes),
        )
        self.train_accuracy = MulticlassAccuracy(num_classes)
        self.val_accuracy = MulticlassAccuracy(num_classes)
        self.test_accuracy = MulticlassAccuracy(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: [b, 1, height, width]. Returns logits, [b, classes]."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss of the batch."""
        return self._run("train", self.train_accuracy, batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy."""
        self._run("val", self.val_accuracy, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy."""
        self._run("test", self.test_accuracy, batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the likeliest class of each picture, [b]."""
        logits: Tensor = self(batch[0])
        return logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        """AdamW, slower from epoch to epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _run(self, split: str, accuracy: MulticlassAccuracy, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy(logits, labels)
        self.log(f"{split}_loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{split}_accuracy", accuracy, prog_bar=True, on_step=False, on_epoch=True)
        return loss


def _layer(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(num_in, num_out, kernel_size=5, padding=2, bias=False),
        nn.GroupNorm(4, num_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
