"""A small convolutional classifier of images, and pictures of shapes that need no download."""

from .data import Shapes, ShapesDataModule
from .module import ImageClassifier

__all__ = ["ImageClassifier", "Shapes", "ShapesDataModule"]
