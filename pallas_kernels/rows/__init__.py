"""Kernels of a token of one row, or of each of a few rows: whole halves of a layer, products, attention, experts."""
