"""A token of one row: kernels that join the step of the rule with the products around it."""
