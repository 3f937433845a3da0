"""Write the catalogue of a shop as its software exports it: python examples/shop/make_shop.py shop/ --rows 10000

Semicolons, Windows-1252, " | " within texts and between categories, empty cells, repeated articles, articles without a
category, and a few with a wrong one. `catalogue.csv` is labelled, `new.csv` is not; `wrong.txt` has the keys of the
articles with a wrong category, which a shop would not have.
"""

import argparse
import csv
import random
from collections.abc import Iterator
from pathlib import Path

ARTICLES = {
    "Mützen": "Mütze Strickmütze Beanie Bommelmütze Schirmmütze",
    "Schuhe": "Stiefel Turnschuh Sandale Halbschuh Gummistiefel",
    "Gürtel": "Gürtel Ledergürtel Stoffgürtel Flechtgürtel",
    "Jacken": "Jacke Regenjacke Steppjacke Windjacke Weste",
    "Hosen": "Jeans Cordhose Chino Leggings Shorts",
    "Taschen": "Rucksack Umhängetasche Beutel Koffer Bauchtasche",
    "Schals": "Schal Halstuch Loop Stola Dreieckstuch",
    "Handschuhe": "Fäustling Fingerhandschuh Pulswärmer Lederhandschuh",
}
PEOPLE = {"Damen": "Damen für_sie feminin", "Herren": "Herren für_ihn maskulin", "Kinder": "Kinder Mädchen Jungen"}
COLOURS = ["rot", "blau", "grün", "schwarz", "weiß", "grau", "gelb", "braun"]
MATERIALS = ["Wolle", "Leder", "Baumwolle", "Leinen", "Kaschmir", "Nylon", "Filz"]
COLUMNS = ["Artikelnummer", "Bezeichnung", "Beschreibung", "Kategorien", "Preis"]
VAGUE, RARE = "Sonstiges", "Geschenke"  # a category without words of its own, and one with three articles
WRONG, VAGUE_SHARE, UNLABELLED, REPEATED, EMPTY = 0.03, 0.06, 0.04, 0.05, 0.2  # shares of the articles


def articles(dice: random.Random, rows: int) -> Iterator[tuple[list[str], list[str], bool]]:
    """Yield for each article: cells without categories, categories, and whether one of them is wrong."""
    for number in range(rows):
        (kind, names), (who, words) = dice.choice([*ARTICLES.items()]), dice.choice([*PEOPLE.items()])
        material, colour = dice.choice(MATERIALS), dice.choice(COLOURS)
        name = f"{dice.choice(names.split())} {dice.choice(words.split()).replace('_', ' ')}"
        about = f"{name} aus {material} | {colour}, Größe {dice.randint(34, 46)}\nnur; solange der Vorrat reicht"
        cells = [f"A-{number:06d}", f"{name}, {colour}", "" if dice.random() < EMPTY else about]
        categories, wrong = [kind, who], dice.random() < WRONG
        if wrong:
            categories[0] = dice.choice([other for other in ARTICLES if other != kind])
        elif dice.random() < VAGUE_SHARE:
            categories.append(VAGUE)
        if number % (rows // 3) == 1:
            categories.append(RARE)
        yield [*cells, f"{dice.randint(500, 20000) / 100:.2f}".replace(".", ",")], categories, wrong


def write(folder: Path, rows: int = 10_000, new: int = 1_000, seed: int = 0) -> None:
    """Write the files of a shop with about so many labelled and `new` articles to `folder`."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "catalogue.csv", "w", encoding="cp1252", newline="") as file:
        table, keys = csv.writer(file, delimiter=";"), []
        table.writerow(COLUMNS)
        for (*cells, price), categories, wrong in articles(dice, rows):
            shown = "" if dice.random() < UNLABELLED else " | ".join(categories)
            table.writerow([*cells, shown, price])
            if wrong and shown:
                keys.append(cells[0])
            if dice.random() < REPEATED:
                table.writerow([f"{cells[0]}-2", *cells[1:], shown, price])
    (folder / "wrong.txt").write_text("\n".join(keys))
    with open(folder / "new.csv", "w", encoding="cp1252", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow([*COLUMNS[:3], COLUMNS[4]])
        for number, (cells, _, _) in enumerate(articles(dice, new)):
            table.writerow([f"N-{number:06d}", "=" * (number == 3) + cells[1], *cells[2:]])


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--rows", type=int, default=10_000)
    options = given.parse_args()
    write(options.folder, options.rows)
