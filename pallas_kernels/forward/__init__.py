"""The forward: the walk over chunks for outputs, for what segments do to a state, and the composition of both."""
