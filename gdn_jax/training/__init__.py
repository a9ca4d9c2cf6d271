"""One run of a model on a task: options, steps, checkpoints, the commands that use a run."""
