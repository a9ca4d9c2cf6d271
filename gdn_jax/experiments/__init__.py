"""Training experiments: byte-level language modelling of real text and multi-query associative recall.

    options      the command line as frozen dataclasses, and their checks
    text         files to byte streams, held-out split, windows
    ngrams       bigram and trigram tables, the yardstick of the byte model
    recall       sequences of multi-query associative recall
    tasks        what a task is: batches, metrics, baselines, a sample
    training     one jitted step, the loop around it
    checkpoints  Orbax, kept apart from the rest
    runs         the run folder: config.json, metrics.jsonl, result.json, sample.txt
    plotting     curves.png
    cli          the `gdn` command

Needs the extra `experiments` (optax, orbax-checkpoint, matplotlib, rich, tyro); `import gdn_jax` does not.
"""
