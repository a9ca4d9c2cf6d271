"""Calls of other libraries by this one: functions with their names, arguments, layouts, dtypes and results.

A file for each library: `fla`, `maxtext`, `tokamax`, `skyrl`, `keras_hub` and `tpu_inference`. None imports it.
"""
