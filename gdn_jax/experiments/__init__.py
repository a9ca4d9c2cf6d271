"""What trains: one run of a model on a task. tasks: what there is to learn; sweeps: many runs, compared."""
