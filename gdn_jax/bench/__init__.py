"""Commands that time: the rule, its kernels, serving, training steps."""
