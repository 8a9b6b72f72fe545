"""Fourfold: spread a Hugging Face causal LM over many GPUs, every layout refused or proven equal to one process."""

__version__ = "0.1.0"
