"""Terms of the page in a sentence each, shown where a reader points at one."""

import re

from markupsafe import Markup, escape

TERMS = {
    "P@k": "precision: of the first k predictions, the share that is right, on average over the queries",
    "nDCG@k": "like precision, but a right prediction counts more the earlier it stands; 100 is the best order",
    "R@k": "recall: of a query's true labels, the share that is among the first k predictions",
    "PSP@k": "precision in which a rare label counts more than a frequent one, by the propensity constants of the data",
    "baseline": "a ranking without a model, on the first queries of the split: what a model should be above",
    "popular labels": "the most frequent labels of training, the same for every query",
    "nearest queries by TF-IDF": "labels of the training queries whose words are most like those of the query",
    "nearest label texts by TF-IDF": "labels whose own texts have words most like those of the query",
    "±": "half of the 95 % interval, by drawing queries again and again (bootstrap)",
    "seen": "queries whose text is that of a training point: a model can know their labels by heart",
    "unseen": "queries whose text no training point has",
    "found": "true labels among the first 5 predictions",
    "step": "batches trained until the checkpoint that was scored",
    "epoch": "one pass over all training points; the first is 0",
    "loss": "mean of what training lowers; comparable between runs of one loss alone",
    "split": "a part of the data: train is learned from, test and val are scored",
    "shards": "files that a table is divided into",
    "truncated": "points whose text was cut off at the greatest number of tokens",
    "merged": "rows of the input that were put together with another of the same key or text",
    "in train": "points with a text that train has too: metrics on them flatter",
    "K": "hard negatives that a table has for each query",
    "hard negative": "a wrong label that the model scores high, so that learning from it is worth most",
    "table": "hard negatives of every query, mined from the vectors of one epoch for a later one",
    "recall": "share of the true nearest labels that the index found, measured on a sample by exact search",
    "overlap": "share of the negatives that the table before had too",
    "above a positive": "share of queries whose hardest negative scores above their weakest true label",
    "padded rows": "queries with fewer than K negatives left after filters",
    "index": "how near labels were looked for; exact compares with every label",
}
_AT = re.compile(r"@\d+$")


def explain(name: str) -> Markup:
    """Return `name` as HTML, with its meaning where it is a term (P@5 is P@k)."""
    meaning = TERMS.get(_AT.sub("@k", name))
    if meaning is None:
        return escape(name)
    return Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(meaning, name)
