"""What several files of kernels need."""

import pytest

from gdn_jax.parts.kernels import trusted
from pallas_kernels.rows import dense_stream, latent_row, routed_stream, row_product


@pytest.fixture
def small(monkeypatch, interpreted):
    """The kernels of one row by a few CTAs, interpreted; which were called."""
    monkeypatch.setattr(routed_stream.Config, "default", lambda: routed_stream.Config(5, 2, 2, 2))
    monkeypatch.setattr(row_product.Config, "stream", lambda F: row_product.Config(8, 3))
    monkeypatch.setattr(row_product.Config, "heads", lambda: row_product.Config(8, 3))
    monkeypatch.setattr(latent_row.Config, "default", lambda slots: latent_row.Config(2, 2))
    monkeypatch.setattr(dense_stream.Config, "default", lambda: dense_stream.Config(17, 16))
    with trusted():
        yield interpreted
