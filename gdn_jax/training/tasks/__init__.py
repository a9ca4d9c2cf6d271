"""Tasks that models are trained on."""
