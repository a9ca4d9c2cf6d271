"""Calls of other libraries by this one: functions with their names, arguments, layouts, dtypes and results.

Each file is one neighbour: `fla`, `maxtext`, `tokamax`, `skyrl` and `tpu_inference`. None imports that library.
"""
