"""A GPT as GPT-2 and GPT-3 have it, and its training."""

from .generate import generate
from .model import GPT
from .module import GPTModule

__all__ = ["GPT", "GPTModule", "generate"]
