"""Pallas Mosaic GPU kernels of the gated delta rule for NVIDIA Hopper. They know arrays and configurations, never
layers."""
