"""Experiments: training on text and on generated tasks, sweeps that compare token mixers, checks and benchmarks.

Training:

    options        the command line as frozen dataclasses, and their checks; task_options: those of each task
    training       the loop of one run; steps: its pure functions; checkpoints: Orbax, kept apart from the rest
    runs           the run folder: config.json, metrics.jsonl, result.json, sample.txt
    sweep          mixers x learning rates x seeds; sweep_options: its grid and presets; mixers: what is compared
    summary        what the runs of a sweep say, as a table
    plotting       curves.png and figure.png; progress: what is shown meanwhile

Tasks:

    tasks          what a task is: batches, metrics, baselines, a sample; generated: those that are drawn at random
    text           files to byte streams, held-out split, windows; ngrams: the yardstick of the byte model
    recall         sequences of multi-query associative recall
    needle         a needle in a haystack
    state_tracking parity, and the word problem of a permutation group
    copying        a sequence and its copy

The rule: check compares its implementations with the oracle, bench times them. cli is the `gdn` command.

Needs the extra `experiments` (optax, orbax-checkpoint, matplotlib, rich, tyro); `import gdn_jax` does not.
"""
