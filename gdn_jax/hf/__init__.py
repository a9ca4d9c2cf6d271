"""Hugging Face checkpoints of hybrid language models, read and written without torch."""

from gdn_jax.hf.load import load_hf
from gdn_jax.hf.save import save_hf
from gdn_jax.hf.save_adapter import save_adapter

__all__ = ["load_hf", "save_adapter", "save_hf"]
