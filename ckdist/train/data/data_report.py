"""Counts of the records of a data set: by form, left out, and unusual, each with an example."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SHOWN_BAD_LINES = 5


def counted(number: int, noun: str) -> str:
    """A number with its noun, as "1 record" and "2 records"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass
class DataReport:
    """The counts of one token cache, which stores them."""

    forms: dict[str, int] = field(default_factory=dict)  # records by form
    answers: int = 0  # of chats
    sequences: int = 0  # that the answers are learned in
    notes: dict[str, list[Any]] = field(default_factory=dict)  # finding -> [count, example's file:line]
    skipped: int = 0  # records that were left out
    bad: list[str] = field(default_factory=list)  # the first of these, with the reason

    def add_record(self, form: str) -> None:
        """Counts a record that is learned."""
        self.forms[form] = self.forms.get(form, 0) + 1

    def add_note(self, note: str, where: str) -> None:
        """Counts a finding of the record at `where`."""
        self.notes.setdefault(note, [0, where])[0] += 1

    def add_bad(self, where: str, why: str) -> None:
        """Counts a record that is left out."""
        self.skipped += 1
        if len(self.bad) < SHOWN_BAD_LINES:
            self.bad.append(f"{where} {why}")

    def lines(self) -> Iterator[str]:
        """The report, a finding per line."""
        forms = ", ".join(f"{count} of {form}" for form, count in self.forms.items())
        yield f"{counted(sum(self.forms.values()), 'record')}: {forms or 'none'}"
        if self.answers:
            yield f"{counted(self.answers, 'answer')} in {counted(self.sequences, 'sequence')}"
        for note, (count, where) in self.notes.items():
            yield f"{count} {note}, as in {where}"
