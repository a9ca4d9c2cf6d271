"""The delta rule: its definition, its plain forms, its sets of kernels, and the public operations over them."""
