"""Commands that look at a model without training it."""
