"""Names of the aligned files of XC data sets, and which of them are at a source."""

from collections.abc import Sequence

from pipelines.formats import lines
from pipelines.formats.aligned_files import FEATURES, JSON, TEXT, check_features, labels_by_number, read_size
from pipelines.formats.base import LABELS, SPLITS, Inputs, Part
from pipelines.formats.names import filters_at, listing, one_of
from schemas.errors import InputError
from schemas.storage import join

_STEMS = {"train": "trn", "val": "val", "test": "tst", LABELS: "lbl"}


def usual(table: str, role: str) -> tuple[str, ...]:
    """List the names that the file of `role` (LABELS, FEATURES, TEXT, JSON) of `table` may have."""
    stem = _STEMS[table]
    plain, whole = _LABEL_NAMES[role] if table == LABELS else _split_names(stem, table, role)
    return (*(name + codec for name in plain for codec in lines.SUFFIXES), *whole)


_LABEL_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    LABELS: ((), ()),
    FEATURES: (("lbl_X_Xf.txt", "Yf.txt"), ("lbl_X_Xf.npz",)),
    TEXT: (("Y.txt", "raw/Y.txt", "lbl.raw.txt", "raw_data/label.raw.txt"), ()),
    JSON: ((), ("lbl.json.gz", "lbl.raw.json.gz")),
}


def _split_names(stem: str, table: str, role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names that may end in a codec's suffix, names as they are)."""
    return {
        LABELS: ((f"{stem}_X_Y.txt",), (f"{stem}_X_Y.npz", f"Y.{stem}.npz")),
        FEATURES: ((f"{stem}_X_Xf.txt",), (f"{stem}_X_Xf.npz", f"X.{stem}.npz")),
        TEXT: (
            (f"{stem}_X.txt", f"raw/{stem}_X.txt", f"{stem}.raw.txt", f"raw_data/{table}.raw.txt", f"X.{stem}.txt"),
            (),
        ),
        JSON: ((), (f"{stem}.json.gz", f"{stem}.raw.json.gz")),
    }[role]


def is_any(names: Sequence[str], table: str, role: str) -> bool:
    """Tell whether `names` hold the file of `role` of `table`."""
    return any(name in names for name in usual(table, role))


def find_parts(source: str, name: str, expects: str, roles: Sequence[str], required: str) -> Inputs:
    """Find the data set at `source` as parts whose files have the `roles`; every split has to have the `required` one.

    Sizes are those of the headers. Raises InputError: a file is missing or given twice, or headers disagree.
    """
    source, names = listing(source)
    parts = []
    for table in (*SPLITS, LABELS):
        files = {
            role: join(source, file) for role in roles if (file := one_of(source, names, usual(table, role), expects))
        }
        if table != LABELS:
            if not files.keys() & {LABELS, required} and table != "train":
                continue  # texts alone make no split, nor do they make a test split of another form
            needed = [required] if JSON in files else [LABELS, required]
            for role in [role for role in needed if role not in files]:
                one_of(source, names, usual(table, role), f"{expects}, of each split", required=True)
        if files:
            first = next(files[role] for role in (LABELS, JSON, TEXT, FEATURES) if role in files)
            parts.append(Part(table, first.rsplit("/", 1)[-1], files))
    return _sized(source, name, parts, names)


def _sized(source: str, name: str, parts: list[Part], names: Sequence[str]) -> Inputs:
    """Return the inputs with the numbers of labels and features, from the headers."""
    of_labels = next((part for part in parts if part.table == LABELS), None)
    columns = {part.table: read_size(part.files[LABELS]) for part in parts if LABELS in part.files}
    widths = [(read_size(part.files[FEATURES])[1], part.files[FEATURES]) for part in parts if FEATURES in part.files]
    features, widest = max(widths, default=(None, ""))
    if features is not None:
        check_features(features, widest)
    labels = max((size[1] for size in columns.values()), default=None)
    if of_labels is None:
        if labels is None:
            raise InputError(
                f"{source}: nothing states how many labels there are. Expected lbl.json.gz beside the rest."
            )
        widest = next(
            part.files[LABELS] for part in parts if part.table in columns and columns[part.table][1] == labels
        )
        parts.append(labels_by_number(labels, sum(size[0] for size in columns.values()), widest))
    elif FEATURES in of_labels.files:
        rows = read_size(of_labels.files[FEATURES])[0]
        if labels is not None and labels > rows:
            raise InputError(
                f"{of_labels.files[FEATURES]}: the header states {rows:,} rows, one a label, but the label matrices "
                f"have {labels:,} columns. Are they of one data set?"
            )
        labels = rows
    else:
        labels = None  # a line is a label: they are counted
    return Inputs(name, tuple(parts), keyed=False, filters=filters_at(source, names), labels=labels, features=features)
