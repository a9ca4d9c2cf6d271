"""Published settings as data: what a paper ran, the numbers that it gives, and the options that run it here.

Numbers and settings are those that were read in the paper; the others are None, "not confirmed", and
an entry says which of its options are of this project. Options have the names of a sweep's config.json and take the
place of the defaults of `gdn sweep TASK --size full`, or small.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A number of a paper.

    Fields:
      rule: its name there.
      at: where it was asked there.
      value: accuracy in %, or what the entry's `unit` says; None: not confirmed.
      mixer: ours beside it, None where there is none.
      here: size of our test beside it, and that of the small version.
    """

    rule: str
    at: str
    value: float | None
    mixer: str | None
    here: tuple[int, int]


class Entry(NamedTuple):
    """A table or figure of a paper.

    Fields:
      paper, url, where: what it is from.
      claim: what it says.
      setting: of the paper.
      differs: what is otherwise here, and what is not confirmed.
      task: of `gdn sweep`.
      full, small: options.
      published: its numbers.
      best_run: the paper shows its best run, and so do we, by what is asked; else means are put beside its numbers.
      unit: of its numbers.
    """

    paper: str
    url: str
    where: str
    claim: str
    setting: str
    differs: str
    task: str
    full: dict[str, Any]
    small: dict[str, Any]
    published: tuple[Published, ...]
    best_run: bool = False
    unit: str = "%"


def _unconfirmed(at: str, here: tuple[int, int], **rules: str | None) -> tuple[Published, ...]:
    """Rules whose numbers are not confirmed; the names of our mixers by theirs."""
    return tuple(Published(rule.replace("_", " "), at, None, mixer, here) for rule, mixer in rules.items())


_GDN = "Gated DeltaNet", "https://arxiv.org/abs/2412.06464"
_GRAZZI = "Grazzi et al.", "https://arxiv.org/abs/2411.12537"
_KIMI = "Kimi Linear", "https://arxiv.org/abs/2510.26692"
_ONE_TRY = {"seeds": 2, "lrs": [0.012], "together": 1}
_FOUR = ["linear_attention", "mamba2", "delta_net", "gated_delta_net"]
_KIMI_GRID = {"num_layers": 2, "num_heads": 2, "head_dim": 128, "hidden_size": 256, "steps": 20_000}
_KIMI_GRID |= {
    "lrs": [5e-5, 1e-4, 5e-4, 1e-3],
    "seeds": 1,
    "together": 4,
    "val_sequences": 256,
    "expand_v": 1.0,
    "mixers": ["mamba2", "gated_delta_net", "kda"],
    "deterministic": False,
}
_KIMI_SETTING = (
    "2 layers, 2 heads of 128, up to 20,000 steps, 4 learning rates from 5e-5 to 1e-3, the best accuracy in "
    "training, lengths 256 to 2048"
)
_NEEDLE = "1.3B language models, 100B tokens in rows of 4K, asked without training on the task"
_NEEDLE_DIFFERS = (
    "models of 3.8M parameters, trained on the needle in 512 bytes and asked at eight times that; gates begin ten "
    "times slower"
)
_RETENTION = {
    "haystack": "repeated", "value": "number", "text_weight": 0.1, "length": 512,
    "test_lengths": [512, 1024, 2048, 4096], "val_sequences": 256, "mixers": _FOUR, "lrs": [0.001, 0.003],
    "seeds": 5, "steps": 2000, "batch_size": 32, "together": 1, "deterministic": False, "hidden_size": 256,
    "num_layers": 4, "num_heads": 2, "head_dim": 96, "expand_v": 2.0, "time_step": 0.1, "mlp_ratio": 8 / 3,
}  # fmt: skip
_CODE = {"haystack": "text", "value": "code"}
_SHORT = {
    "text_weight": 0.1, "length": 256, "test_lengths": [256, 512], "mixers": ["mamba2", "delta_net"], "steps": 300,
    "batch_size": 8, "val_sequences": 32, "time_step": 0.1, "implementation": "auto", "hidden_size": 48,
    "num_layers": 2, "num_heads": 2, "head_dim": 16, "seeds": 2, "lrs": [0.006],
}  # fmt: skip

LEDGER: dict[str, Entry] = {
    "2312.04927/mqar": Entry(
        "Zoology", "https://arxiv.org/abs/2312.04927", "MQAR of its repository",
        "recall of many pairs by the size of the state",
        "180,000 sequences for 32 epochs, 22,500 steps of 256, 4 learning rates from 1e-3 to 3.2e-2, the best run, "
        "2 heads of 32, 64 or 128, one mixer after a convolution, no SwiGLU, up to 256 pairs in 1024 tokens",
        "two mixers with SwiGLU, a width of 128 for all heads, 20,000 sequences of each kind, one seed a rate",
        "recall",
        {
            "vocab_size": 8192, "cases": ["64:4"] * 5 + ["128:8", "256:16", "256:32", "256:64"],
            "test_cases": ["512:128", "1024:256"], "train_sequences": 20_000, "val_sequences": 1280,
            "rewrite": False, "vary_pairs": False, "power": 0.01, "mixers": [*_FOUR, "softmax_attention"],
            "scales": [1, 2, 4], "scaled": "state", "lrs": [0.001, 0.0032, 0.01, 0.032], "seeds": 1,
            "steps": 22_500, "batch_size": 256, "together": 4, "curve_every": 250, "deterministic": False,
            "hidden_size": 128, "num_heads": 2, "head_dim": 32, "time_step": 1.0,
        },
        {
            "num_pairs": 4, "length": 24, "vocab_size": 32, "test_pairs": [2, 4], "rewrite": False,
            "mixers": ["mamba2", "delta_net"], "lrs": [0.01, 0.025], "seeds": 1, "steps": 400, "together": 1,
        },
        _unconfirmed("256 pairs in 1024 tokens", (256, 4), linear_attention="linear_attention", Mamba2="mamba2",
                     DeltaNet="delta_net", Gated_DeltaNet="gated_delta_net", attention="softmax_attention"),
        best_run=True,
    ),
    "2411.12537/parity": Entry(
        *_GRAZZI, "Theorem 1 and Table 3", "parity needs an eigenvalue that is not >= 0",
        "rows of 3 to 40 bits in training, the best of 3 runs at 40 to 256; accuracies scaled from 0, a guess, to 1: "
        "0.000 and 0.017 with eigenvalues in [0, 1], 1.000 in [-1, 1], which stand below as shares of right answers",
        "two layers, Mamba2's decay and Gated DeltaNet in the places of Mamba and DeltaNet, trained on 64 bits, "
        "asked at 256", "parity",
        {"mixers": ["mamba2", "gated_delta_net", "gated_delta_net_neg"], "seeds": 5, "together": 15,
         "lrs": [0.001, 0.003, 0.01], "test_lengths": [64, 256, 1024]},
        {"mixers": ["gated_delta_net", "gated_delta_net_neg"], "length": 16, "test_lengths": [16, 64], "steps": 600,
         **_ONE_TRY},
        (Published("Mamba [0, 1]", "40 to 256", 50.0, "mamba2", (256, 64)),
         Published("DeltaNet [0, 1]", "40 to 256", 50.85, "gated_delta_net", (256, 64)),
         Published("DeltaNet [-1, 1]", "40 to 256", 100.0, "gated_delta_net_neg", (256, 64))),
        best_run=True,
    ),
    "2411.12537/swaps": Entry(
        *_GRAZZI, "Figure 4, S5 only swaps", "one layer with eigenvalues in [-1, 1] follows swaps of S5",
        "swaps and the identity, rows of 32 in training, 100 epochs, rows that are right throughout, the best of 3 "
        "seeds; one layer of DeltaNet learns it fully with eigenvalues in [-1, 1], five with those in [0, 1] go just "
        "beyond the training length",
        "swaps alone, Gated DeltaNet in the place of DeltaNet, letters that are right; trained on 32, asked at 128; "
        "S3 in the small version", "permutation",
        {"group": "S5", "elements": "swaps", "length": 32, "test_lengths": [32, 64, 128], "num_layers": 1,
         "mixers": ["mamba2", "gated_delta_net", "gated_delta_net_neg"], "seeds": 5, "lrs": [0.001, 0.003],
         "steps": 4000, "together": 10},
        {"group": "S3", "elements": "swaps", "length": 12, "test_lengths": [12, 24], "steps": 600,
         "mixers": ["gated_delta_net", "gated_delta_net_neg"], **_ONE_TRY},
        (Published("Mamba [0, 1]", "beyond training", None, "mamba2", (128, 24)),
         Published("DeltaNet [0, 1]", "beyond training", None, "gated_delta_net", (128, 24)),
         Published("DeltaNet [-1, 1]", "beyond training", None, "gated_delta_net_neg", (128, 24))),
        best_run=True,
    ),
    "2412.06464/table2": Entry(
        *_GDN, "Table 2, S-NIAH-1", "a decay alone forgets a number amid repeated words",
        _NEEDLE, _NEEDLE_DIFFERS, "sentence", _RETENTION | {"mixers": _FOUR[1:]}, _SHORT,
        (Published("DeltaNet", "8K", 98.8, "delta_net", (4096, 512)),
         Published("Gated DeltaNet", "8K", 91.8, "gated_delta_net", (4096, 512)),
         Published("Mamba2", "8K", 30.4, "mamba2", (4096, 512))),
    ),
    "2412.06464/table2-text": Entry(
        *_GDN, "Table 2, S-NIAH-2", "a gate keeps a needle in text that fills the state",
        _NEEDLE, "models of a small state that learn the text as well, in rows of 2048", "sentence",
        _RETENTION | {"haystack": "text", "packages": True, "text_weight": 1.0, "length": 2048, "head_dim": 24,
                      "test_lengths": [2048, 8192]},
        _SHORT | {"haystack": "text", "text_weight": 1.0, "mixers": ["delta_net", "gated_delta_net"]},
        (Published("DeltaNet", "2K", 45.6, "delta_net", (2048, 256)),
         Published("Gated DeltaNet", "2K", 99.8, "gated_delta_net", (2048, 256)),
         Published("DeltaNet", "8K", 14.4, "delta_net", (8192, 512)),
         Published("Gated DeltaNet", "8K", 29.6, "gated_delta_net", (8192, 512))),
    ),
    "2412.06464/table2-code": Entry(
        *_GDN, "Table 2, S-NIAH-3", "the delta rule helps to keep a long code in text",
        _NEEDLE, _NEEDLE_DIFFERS, "sentence", _RETENTION | _CODE | {"packages": True}, _SHORT | _CODE,
        (Published("DeltaNet", "4K", 22.4, "delta_net", (4096, 512)),
         Published("Gated DeltaNet", "4K", 27.6, "gated_delta_net", (4096, 512)),
         Published("Mamba2", "4K", 4.6, "mamba2", (4096, 512))),
    ),
    "2412.06464/table3": Entry(
        *_GDN, "Table 3", "Gated DeltaNet before Mamba2 and DeltaNet, hybrids before all",
        "1.3B models, 100B tokens of FineWeb-Edu in rows of 4K, asked for WikiText; hybrids with attention over 2K",
        "30M parameters, 16 million bytes of Python source; Mamba2's decay with unit keys; a hybrid with attention "
        "over the whole row in every fourth layer", "bytes",
        {"packages": True, "length": 2048, "test_lengths": [2048], "val_bytes": 524_288, "lrs": [0.001, 0.003],
         "mixers": ["mamba2", "delta_net", "gated_delta_net", "transformer", "hybrid"], "lr_seeds": 1, "seeds": 3,
         "steps": 500, "batch_size": 16, "together": 1, "deterministic": False, "remat": "none"},
        {"mixers": _FOUR[1:], "steps": 120, "seeds": 1, "lrs": [0.006], "together": 1, "test_lengths": [128]},
        (Published("Transformer++", "WikiText", 18.53, "transformer", (2048, 128)),
         Published("DeltaNet", "WikiText", 17.71, "delta_net", (2048, 128)),
         Published("Mamba2", "WikiText", 16.56, "mamba2", (2048, 128)),
         Published("Gated DeltaNet", "WikiText", 16.42, "gated_delta_net", (2048, 128)),
         Published("Gated DeltaNet-H1", "WikiText", 16.07, "hybrid", (2048, 128)),
         Published("Gated DeltaNet-H2", "WikiText", 15.91, None, (2048, 128))),
        unit="perplexity",
    ),
    "2510.26692/palindrome": Entry(
        *_KIMI, "section 5, palindrome", "KDA before Gated DeltaNet, and Mamba2 fails",
        _KIMI_SETTING, "rows of 512 alone, new ones; batch and vocabulary not confirmed", "palindrome",
        _KIMI_GRID | {"num_tokens": 64, "length": 256, "test_lengths": [256]},
        {"length": 8, "test_lengths": [8], "steps": 500, "mixers": ["mamba2", "gated_delta_net"], **_ONE_TRY},
        _unconfirmed("512 tokens", (256, 8), KDA="kda", Gated_DeltaNet="gated_delta_net", Mamba2="mamba2"),
        best_run=True,
    ),
    "2510.26692/stack": Entry(
        *_KIMI, "section 5, stack", "KDA before Gated DeltaNet, and Mamba2 fails",
        _KIMI_SETTING + ", 64 stacks",
        "rows of 510 alone, new ones; how often it pops, batch and vocabulary not confirmed", "stack",
        _KIMI_GRID | {"num_stacks": 64, "num_tokens": 64, "length": 510, "test_lengths": [510]},
        {"num_stacks": 2, "num_tokens": 8, "length": 24, "test_lengths": [24], "steps": 500,
         "mixers": ["mamba2", "gated_delta_net"], **_ONE_TRY},
        _unconfirmed("512 tokens", (510, 24), KDA="kda", Gated_DeltaNet="gated_delta_net", Mamba2="mamba2"),
        best_run=True,
    ),
    "FdXB4u27LD/factorial": Entry(
        "FdXB4u27LD", "https://openreview.net/forum?id=FdXB4u27LD", "factorial of decay and delta",
        "every variant with the delta rule is better than every one without; a decay by channel helps with it only",
        "18M, 42M and 125M parameters, TinyStories and WikiText-103, 3 seeds, top three within 0.009 nats",
        "Python source as bytes instead of stories; decays that depend on the data alone", "bytes",
        {"mixers": [*_FOUR, "gla", "kda"], "lrs": [0.001, 0.003], "lr_seeds": 1, "seeds": 3, "steps": 2000,
         "batch_size": 32, "length": 1024, "test_lengths": [1024], "packages": True, "together": 1,
         "deterministic": False, "hidden_size": 384, "num_layers": 8, "num_heads": 4, "head_dim": 72},
        {"mixers": _FOUR, "steps": 120, "seeds": 1, "lrs": [0.006], "together": 1, "test_lengths": [128]},
        _unconfirmed("validation", (1024, 128), no_decay="linear_attention", scalar_decay="mamba2",
                     delta="delta_net", scalar_decay_and_delta="gated_delta_net", channel_decay="gla",
                     channel_decay_and_delta="kda"),
    ),
}  # fmt: skip
"""Entries by name, the paper's and then the table's."""
