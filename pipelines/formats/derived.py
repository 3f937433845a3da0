"""Labels that nobody lists: those that points name, by their keys, which are their texts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.base import Parsed, labels_schema
from pipelines.formats.rejects import Reject


def labels_of(points: Parsed) -> Parsed:
    """Return the labels that parsed points name, each once, in the order of their first row; the points' rejects go."""
    named = points.batch["label_keys"]
    owner = np.repeat(np.arange(len(named)), pc.list_value_length(named).to_numpy())
    coded = named.flatten().dictionary_encode()
    first = np.full(len(coded.dictionary), len(owner), np.int64)
    np.minimum.at(first, coded.indices.to_numpy(), np.arange(len(owner)))
    rows = points.batch["row"].take(pa.array(owner[first]))
    return Parsed(pa.record_batch([rows, coded.dictionary, coded.dictionary], schema=labels_schema(False)), [])


def remapped(parsed: Parsed, places: Sequence[int], first_row: int, rejects: Sequence[Reject]) -> Parsed:
    """Return rows that were parsed from 0 on at their `places` behind `first_row`, with more `rejects`."""
    place = np.asarray(places, np.int64)
    rows = pa.array(place[parsed.batch["row"].to_numpy()] + first_row)
    own = [replace(reject, line=int(place[reject.line - 1]) + first_row + 1) for reject in parsed.rejects]
    return Parsed(parsed.batch.set_column(0, parsed.batch.schema.field(0), rows), sorted([*own, *rejects]))
