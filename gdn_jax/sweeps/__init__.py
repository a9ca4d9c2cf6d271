"""The same model with several token mixers, learning rates and seeds."""
