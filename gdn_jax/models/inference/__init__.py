"""Copies of a model for inference: weights as generation reads them, and parts with few kernels a token."""
