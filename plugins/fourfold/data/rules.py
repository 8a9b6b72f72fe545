"""Rules of the data settings. Pure."""

from collections.abc import Iterator
from math import inf

from fourfold.ranges import at_least
from fourfold.schema import DataConfig, MixtureSource


def refusals(settings: DataConfig) -> Iterator[str]:
    """Why nothing can be learned from what these name; all reasons. Nothing is read."""
    yield from at_least(settings, least={"eval_documents": 0, "max_documents": 1, "num_proc": 1}, prefix="data.")
    if settings.eval_path is not None and settings.eval_documents:
        yield (
            f"data.eval_path={settings.eval_path} and data.eval_documents={settings.eval_documents} are two sources of "
            f"evaluation data: keep one."
        )
    if settings.sources is None and settings.path is None:
        yield "Neither data.path nor data.sources says where the data lie: give one of them."
    if settings.sources is not None:
        yield from _mixture(settings, sources=settings.sources)


def _mixture(settings: DataConfig, *, sources: list[MixtureSource]) -> Iterator[str]:
    if not sources:
        yield "data.sources=[] is a mixture of nothing: list a source, or use data.path."
    if settings.path is not None:
        yield f"data.path={settings.path} and data.sources ({len(sources)}) exclude each other: set data.path=null."
    if settings.eval_documents:
        yield (
            f"data.eval_documents={settings.eval_documents} would be held out of which of the {len(sources)} sources? "
            f"Use data.eval_path=<documents to evaluate on> and data.eval_documents=0."
        )
    for number, source in enumerate(sources):
        name = f"data.sources[{number}]"
        yield from at_least(source, least={"max_documents": 1}, prefix=f"{name}.")
        for key in ("weight", "epochs"):
            value = getattr(source, key)
            if value is not None and not 0 < value < inf:
                yield f"{name}.{key}={value}: use more than 0, or take the source out."
    weighted = sum(source.weight is not None for source in sources)
    repeated = sum(source.epochs is not None for source in sources)
    if 0 < weighted < len(sources):
        yield f"{weighted} of {len(sources)} data.sources have a weight: give one to all of them or to none."
    if weighted and repeated:
        yield "data.sources has weights and epochs, which both say how much of a source is taken: keep one of the two."
    if settings.streaming and repeated:
        yield "data.sources with epochs and data.streaming=true: a stream has no known length; use weights."
