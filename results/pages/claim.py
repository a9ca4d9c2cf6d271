"""A claim: what it says, where it is from, and the comparisons of stored runs that it is put to."""

import dataclasses

from results.pages.verdicts import Comparison, Fails, OneSeed


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a claim is from.

    Fields:
      paper, url, where: the paper and the place in it.
      theirs: its numbers, as the table shows them; empty where none was read.
      setting: what it ran.
    """

    paper: str
    url: str
    where: str
    theirs: str = ""
    setting: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim.

    Fields:
      id: its name in links and in `Numbers.outcomes`.
      says: the claim, a sentence.
      source: where it is from; None: a question of our own.
      differs: what is otherwise here, in a few words that end the verdict of a contradiction.
      here: our setting, and what weakens the comparison: sentences.
      decided: what would refute it, or support it where it is contradicted; a sentence.
      comparisons: by a short key; none where nothing was run.
      task: page of the runs.
      same_setting: whether the claim names the setting of ours.
      figure: name of its figure in figures/, and what it shows.
    """

    id: str
    says: str
    source: Source | None
    differs: str
    here: str
    decided: str
    comparisons: dict[str, Comparison | OneSeed | Fails] = dataclasses.field(default_factory=dict)
    task: str = ""
    same_setting: bool = False
    figure: tuple[str, str] | None = None
