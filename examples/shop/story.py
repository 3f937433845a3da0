"""A shop's questions about its categories, each answered by one call: python examples/shop/story.py shop/

Writes a catalogue (`make_shop.py`), trains a model, and asks. The same calls are commands of the shell: `extremis shard
shop/catalogue.csv shop/data --encoding cp1252 …`.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import make_shop

import extremis

FIELDS = "key=Artikelnummer,title=Bezeichnung,content=Beschreibung,labels=Kategorien"
GROUPS = [["Damen", "Herren", "Kinder"]]


def read_csv(path: Path, encoding: str = "utf-8", separator: str = ",") -> list[dict[str, str]]:
    with open(path, encoding=encoding, newline="") as file:
        return [*csv.DictReader(file, delimiter=separator)]


def tell(folder: Path, rows: int = 10_000, new: int = 1_000, row: int = 842, minutes: float = 5) -> dict[str, Any]:
    """Tell the story of a shop with so many articles, and return the answers."""
    make_shop.write(folder, rows, new)
    data, run, exported = (str(folder / name) for name in ("data", "run", "exported"))
    quiet: dict[str, Any] = {"progress": False}

    # The table as it comes: semicolons are found, the encoding is named, rows without a category are left out.
    extremis.shard(
        str(folder / "catalogue.csv"),
        data,
        format="csv",
        fields=FIELDS,
        encoding="cp1252",
        unlabelled="skip",
        test=0.2,
        group="equal",
        keep_text=True,
        **quiet,
    )
    extremis.run("auto", data, run, minutes=minutes, **quiet)

    print("Which categories are bad?")
    extremis.evaluate(data, run, labels=str(folder / "categories.csv"), min_probability=0.5, **quiet)
    table = read_csv(folder / "categories.csv")
    worst = sorted(table, key=lambda category: float(category["F1"] or 0))[:3]
    for category in worst:
        print(f"  {category['label']}: F1 {category['F1']} %, confused with {category['missed_for'] or 'none'}")

    print("May an article be for women and for men? Not by this decision, which the export keeps.")
    decision = {"min_probability": 0.5, "at_least": 1, "groups": GROUPS}
    extremis.export(data, run, exported, decision=decision, **quiet)

    print(f"Why is {make_shop.RARE} never predicted?")
    why = extremis.explain(exported, "Strickmütze für sie, rot", make_shop.RARE, **quiet)
    print(f"  {why.shown[0]}")

    print("Which articles have a wrong category?")
    extremis.crossval(data, str(folder / "wrong"), suspects=50, **quiet)
    suspects = [each for each in read_csv(folder / "wrong" / "suspects.csv") if each["given"].lower() == "true"]
    for suspect in suspects[:3]:
        print(f"  {suspect['key']}: {suspect['label']}? {suspect['text'][:60]}")

    print(f"Where is row {row:,} of my file?")
    extremis.predict(
        exported,
        str(folder / "new.csv"),
        str(folder / "predicted.csv"),
        fields=FIELDS,
        encoding="cp1252",
        wide=True,
        **quiet,
    )
    predicted = read_csv(folder / "predicted.csv", "cp1252", ";")
    print(f"  {predicted[row - 1]}")
    return {"worst": worst, "why": why.to_json(), "suspects": suspects, "predicted": predicted}


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--rows", type=int, default=10_000)
    options = given.parse_args()
    tell(options.folder, options.rows)
