"""The part of a report on retrieval: nDCG by length."""

from lengthwise.evaluate.retrieval_table import retrieval_figure
from lengthwise.evaluate.statistics import interval_words
from lengthwise.study.beside import paper_retrieval_rows
from lengthwise.study.results import StudyResults
from lengthwise.study.sections import Picture, Section
from lengthwise.views.style import png


def retrieval_sections(results: StudyResults) -> list[Section]:
    """nDCG by length with its figure, how it changes and differs, and the paper's table beside."""
    table, length = results.retrieval_table, results.train_length
    if table is None:
        return []
    counts = [len(table.seeds(name, n)) for name in table.names for n in table.lengths]
    over = interval_words(counts, single="groups of queries")
    caption = f"Each line is an encoding; the bars are its 95 % intervals {over}."
    figure = Picture(png(retrieval_figure(table, train_length=length)), caption, "retrieval")
    sections = [Section("Retrieval by length", table.notes(), table.rows(), [figure])]
    if length in table.lengths and table.lengths[-1] > length:
        words = f"The same queries at every length, so what makes them easy or hard cancels; 95 % intervals {over}."
        sections.append(Section("Change of retrieval with length", [words], table.change_rows(length)))
    if rows := table.difference_rows():
        words = f"The same queries, with 95 % intervals {over}."
        sections.append(Section("Paired differences of retrieval", [words], rows))
    if rows := paper_retrieval_rows(results.config.paper, table):
        sections.append(Section("Retrieval beside the paper", ["nDCG@10, of 100."], rows))
    return sections


def retrieval_summary(results: StudyResults, far: int) -> list[str]:
    """How nDCG changes up to a length, in a sentence; and who takes no documents of it."""
    table, length = results.retrieval_table, results.train_length
    if table is None or length not in table.lengths or far not in table.lengths:
        return []
    known = [name for name in table.names if table.seeds(name, far) and table.seeds(name, length)]
    changes = sorted(((table.change(name, far, length)[0], name) for name in known), reverse=True)
    words = ", ".join(f"{name} {change:+.3f}" for change, name in changes)
    refused = [name for name in table.names if table.seeds(name, length) and not table.seeds(name, far)]
    sentence = f"nDCG@10 of documents of {far:,} tokens differs from that of {length:,} by: {words}."
    sentences = [sentence] if words else []
    return sentences + ([f"Documents of {far:,} tokens are refused by: {', '.join(refused)}."] if refused else [])
