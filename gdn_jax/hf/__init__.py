"""Hugging Face checkpoints of hybrid language models, read and written without torch."""

from gdn_jax.hf.load import load_hf
from gdn_jax.hf.save import save_hf

__all__ = ["load_hf", "save_hf"]
