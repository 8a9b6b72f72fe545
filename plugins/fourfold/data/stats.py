"""Counts of one packing, so that nothing is left out without a word."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


@dataclass
class PackStats:
    """Up to the last row taken. Documents are those read; what is left out of the rows is counted by its reason."""

    documents: int = 0
    empty_documents: int = 0  # left out: nothing, white space, or an unreadable file
    documents_without_target: int = 0  # left out: isolated, they could not change any gradient
    dropped_documents: int = 0  # left out: longer than a row (data.long_documents=drop)
    dropped_tokens: int = 0
    truncated_documents: int = 0  # cut to a row (data.long_documents=truncate)
    truncated_tokens: int = 0  # cut off
    cut_documents: int = 0  # spread over more than one row
    pieces: int = 0  # documents in rows, one count for each row
    rows: int = 0
    rows_without_target: int = 0  # e.g. filled by a prompt whose answer is in the next row
    tokens: int = 0  # in rows, padding left out
    targets: int = 0  # labels that count
    padding: int = 0  # positions
    lengths: list[int] = field(default_factory=list)  # [i]: documents of 2^i to 2^(i+1) - 1 tokens

    @property
    def efficiency(self) -> float:
        """Share of the positions that hold a token."""
        return self.tokens / max(self.tokens + self.padding, 1)

    @property
    def left_out(self) -> int:
        return self.empty_documents + self.documents_without_target + self.dropped_documents

    def count_length(self, tokens: int) -> None:
        bucket = tokens.bit_length() - 1
        self.lengths += [0] * (bucket + 1 - len(self.lengths))
        self.lengths[bucket] += 1


def total(parts: Iterable[PackStats]) -> PackStats:
    """The counts of several packings together."""
    result = PackStats()
    for part in parts:
        for one in fields(PackStats):
            if one.name != "lengths":
                setattr(result, one.name, getattr(result, one.name) + getattr(part, one.name))
        longer, shorter = sorted((result.lengths, part.lengths), key=len, reverse=True)
        result.lengths = [count + (shorter[i] if i < len(shorter) else 0) for i, count in enumerate(longer)]
    return result


def described(stats: PackStats) -> str:
    """Documents: how many, which were left out and why, which were cut."""
    told = [f"{stats.documents} documents"]
    left_out = {
        "empty": stats.empty_documents,
        "without target": stats.documents_without_target,
        "too long": stats.dropped_documents,
    }
    reasons = [f"{count} {reason}" for reason, count in left_out.items() if count]
    if reasons:
        told.append(f"left out: {' and '.join(reasons)}")
    if stats.truncated_documents:
        told.append(f"{stats.truncated_documents} truncated by {stats.truncated_tokens} tokens")
    if stats.cut_documents:
        told.append(f"{stats.cut_documents} spread over several rows")
    return "; ".join(told)
