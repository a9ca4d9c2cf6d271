"""Faults of training, sweeps, benchmarks, commands, and numbers of the documentation."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "a run that was stored without its mixer is refused",
        "stored = {name: getattr(default.model, name) for name in _marked(default, Later)} | stored",
        "stored = dict(stored)",
        "tests/test_family_models.py::test_tables",
    ),
    Fault(
        "training batches reach into the held-out text",
        "tokens, targets = text.windows(self.data, starts, self.length)",
        "both = np.concatenate([self.val, self.data])\n"
        "        tokens, targets = text.windows(both, starts, self.length)",
        "tests/test_text_tasks.py::test_training_windows_lie_in_the_training_part",
    ),
    Fault(
        "validation draws with the keys of training",
        "enumerate(self._keys(1, size))",
        "enumerate(self._keys(0, size))",
        "tests/test_tasks.py::test_batches_are_given_by_seed_and_step",
    ),
    Fault(
        "gradients are not clipped",
        "        clip_by_global_norm(options.clip),\n",
        "",
        "tests/test_experiments.py::test_gradients_are_clipped",
    ),
    Fault(
        "files are written in place",
        "    with replacing(path) as file:\n        file.write(content.encode())\n",
        "    path.write_text(content)\n",
        "tests/test_files.py::test_a_file_is_old_or_new",
    ),
    Fault(
        "exactly a half counts as more than half",
        "steps = jnp.sum(left > 0.5, axis=-2)",
        "steps = jnp.sum(left >= 0.5, axis=-2)",
        "tests/test_analysis.py::test_write_half_life_follows_the_gates_that_come",
    ),
    Fault(
        "the second moment has another memory",
        "            b2=0.95,\n",
        "            b2=0.999,\n",
        "tests/test_experiments.py::test_constants_of_the_optimizer",
    ),
    Fault(
        "the weight decay is another one",
        "weight_decay: Annotated[float, NotNegative] = 0.1",
        "weight_decay: Annotated[float, NotNegative] = 0.01",
        "tests/test_experiments.py::test_constants_of_the_optimizer",
    ),
    Fault(
        "milliseconds are those of all calls",
        "(time.perf_counter() - started) / calls * 1e3",
        "(time.perf_counter() - started) * 1e3",
        "tests/test_measure.py::test_the_clock",
    ),
    Fault(
        "rejected drafts are counted",
        '"tokens/s": line.batch * len(line.accepted) / timing.ms * 1e3',
        '"tokens/s": line.batch * line.tokens / timing.ms * 1e3',
        "tests/test_decode_bench.py::test_trees_are_timed",
    ),
    Fault(
        "half-lives are drawn by their longest",
        "order = np.argsort(lives[2])",
        "order = np.argsort(lives[3])",
        "tests/test_plots.py::test_half_lives_are_drawn_by_their_median",
    ),
    Fault(
        "a save counts as training",
        "                mark += time.monotonic() - pause\n",
        "",
        "tests/test_experiments.py::test_saves_and_validations_take_no_time_of_training",
    ),
    Fault(
        "a bound of the documentation is another one",
        "| bound, float32 | 1.0e-5 |",
        "| bound, float32 | 1.0e-6 |",
        "tests/test_check.py::test_numbers_of_the_documentation_are_those_of_the_stored_report",
    ),
    Fault(
        "a notebook says another error than its code",
        '"error of 70 %."',
        '"error of 50 %."',
        "tests/test_notebooks.py::test_numbers_of_prose_are_computed",
    ),
    Fault(
        "learning rates are compared over all seeds that any tried",
        "set.intersection(*({*seeds} for seeds, _ in by_lr))",
        "set.union(*({*seeds} for seeds, _ in by_lr))",
        "tests/test_sweep_results.py::test_other_seeds_run_at_the_best_learning_rate",
    ),
    Fault(
        "the interval of a mean is one-sided",
        "stdtrit(len(values) - 1, 0.975)",
        "stdtrit(len(values) - 1, 0.95)",
        "tests/test_sweep_results.py::test_intervals",
    ),
    Fault(
        "seeds as good as a guess have learned",
        "_LEARNED = 0.9\n",
        "_LEARNED = 1.0\n",
        "tests/test_sweep_results.py",
    ),
    Fault(
        "the remaining seeds try every learning rate",
        "Run(mixer, row.lr, seed, scale, *start) for seed in range(trying, o.seeds)",
        "Run(mixer, o.lrs[0], seed, scale, *start) for seed in range(trying, o.seeds)",
        "tests/test_sweep_results.py::test_other_seeds_run_at_the_best_learning_rate",
    ),
    Fault(
        "a checkpoint is not looked at after it is saved",
        "            self._check_whole(step, state)\n            for old",
        "            for old",
        "tests/test_runs.py::test_a_checkpoint_that_lacks_its_list_is_no_save",
    ),
    Fault(
        "deep JSON is a traceback",
        '    except RecursionError:\n        raise ValueError("objects or lists',
        '    except MemoryError:\n        raise ValueError("objects or lists',
        "tests/test_hf_hostile.py::test_deep_json",
    ),
    Fault(
        "half right is not halfway",
        "if x is not None and x >= 0.5",
        "if x is not None and x > 0.5",
        "tests/test_sweep_results.py::test_starts_and_curves",
    ),
    Fault(
        "directions are counted in another base",
        "jnp.exp(jnp.sum(jax.scipy.special.entr(p), axis=-1))",
        "jnp.exp2(jnp.sum(jax.scipy.special.entr(p), axis=-1))",
        "tests/test_analysis.py::test_spectrum_and_effective_rank",
    ),
    Fault(
        "the learning rate rises to its end",
        "peak_value=1.0,",
        "peak_value=0.9,",
        "tests/test_experiments.py::test_schedule_rises_and_falls",
    ),
    Fault(
        "a changed bit of a checkpoint goes unnoticed",
        'if facts.pop("digest", None) != _digest(state):',
        'if facts.pop("digest", None) is None:',
        "tests/test_runs_damaged.py::test_damaged_checkpoints_are_passed_over",
    ),
    Fault(
        "the middle of the steps is the first",
        "values[len(values) // 2], values[0], values[-1]",
        "values[0], values[0], values[-1]",
        "tests/test_sweep_results.py::test_the_middle_of_steps",
    ),
    Fault(
        "a draft's parent is the token before it",
        'return t - 1 if self.drafts == "chain" else (t + 1) // 2 - 1',
        "return t - 1",
        "tests/test_decode_bench.py::test_periods_of_trees",
    ),
    Fault(
        "the peak of an H200 is another one",
        'PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}',
        'PEAK_FLOPS = {"H100": 989e12, "H200": 1979e12}',
        "tests/test_step_bench.py::test_share_of_peak",
    ),
    Fault(
        "Benjamini and Hochberg's procedure stops at the first p-value that does not pass",
        "if p <= FALSE_DISCOVERIES * i / len(ordered))",
        "if all(q <= FALSE_DISCOVERIES * j / len(ordered) for j, q in enumerate(ordered[:i], 1)))",
        "tests/test_results.py::test_the_statistics",
    ),
    Fault(
        "a run that has diverged is the best one",
        'losses = [math.inf if x["val_loss"] is None',
        'losses = [-1.0 if x["val_loss"] is None',
        "tests/test_reproduce.py::test_an_entry",
    ),
    Fault(
        "a size that was typed gives way to that of a CPU",
        "or any(flag(name) in typed for name in small)",
        "or any(getattr(benchmark, name) != getattr(type(benchmark)(), name) for name in small)",
        "tests/test_bench.py::test_sizes_that_are_typed_stay",
    ),
    Fault(
        "steps of a run's lines may fall",
        'if record["step"] <= before:',
        'if record["step"] == before:',
        "tests/test_runs_damaged.py::test_steps_of_lines_rise",
    ),
    Fault(
        "files are read whatever their size is",
        "file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None",
        "file.read()[:most]",
        "tests/test_files.py::test_only_regular_files_of_a_bounded_size_are_read",
    ),
)
