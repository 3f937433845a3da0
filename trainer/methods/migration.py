"""Map keys in recipes and runs from earlier versions to current keys; no other module does this.

Before methods existed, a recipe chose a head, a pool and sources independently, and the key `method` was the name of
the recipe. The method of such a recipe is derived from these choices.
"""

from collections.abc import Mapping
from typing import Any

# Removed options by dotted key, with the value that had no effect. Recipes and configs may still contain these options.
REMOVED: dict[str, Any] = {
    "classifier.decay": "touched",
    "head.query_batch": 0,
    "negatives.cache": 0,
    "negatives.cache_steps": 32,
    "negatives.frequency_power": 1.0,
    "negatives.in_batch": {"hard": 0},
    "negatives.lsh.growth": 1.1,
    "negatives.lsh.policy": "reservoir",
    "negatives.start": 0,
    "order.tail": "keep",
}
METHODS = ("astra", "renee", "lns", "dexml", "rae", "ngame", "ngame-m2")
_TELLING = ("head", "negatives", "order")
_COUNTS = ("random", "hard", "width")


def migrate_keys(values: Mapping[str, Any], below: Any = "astra", restores: bool = False) -> dict[str, Any]:
    """Return the options of a recipe with current keys. `below`: the method of the recipe that this recipe extends.

    Options that contain no earlier keys stay unchanged. `restores`: the options belong to an existing run, so all
    removed options are dropped, even if their values affected training.
    """
    body = {
        name: _without_removed(name, part, restores and name != "encoder") if isinstance(part, Mapping) else part
        for name, part in values.items()
    }
    if "method" in body and body["method"] not in METHODS:
        if not restores:
            wrong, known = str(body["method"])[:80], ", ".join(METHODS)
            raise ValueError(f"method = {wrong!r}: expected one of {known}; name a recipe with the key `name`")
        body["name"] = body.pop("method")
    if isinstance(body.get("refresh"), dict):
        body["refresh"] = _with_stale(body["refresh"])
    return _with_method(body, body.get("method", below))


def _without_removed(prefix: str, options: Mapping[str, Any], all_of_them: bool) -> dict[str, Any]:
    """Drop removed options whose values had no effect; with `all_of_them`, drop every removed option."""
    return {
        key: _without_removed(f"{prefix}.{key}", value, all_of_them) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if f"{prefix}.{key}" not in REMOVED or (REMOVED[f"{prefix}.{key}"] != value and not all_of_them)
    }


def _with_stale(refresh: dict[str, Any]) -> dict[str, Any]:
    """Replace the earlier key `late` of the section with the key `stale`. Raises ValueError for an unknown value."""
    if "late" not in refresh:
        return refresh
    late, policies = refresh["late"], {"continue": "warn", "wait": "wait"}
    if late not in policies or refresh.get("stale", policies[late]) != policies[late]:
        raise ValueError(
            f"refresh.late = {late!r}: this key is now refresh.stale; expected warn, wait, random-only or stop"
        )
    return {**{name: value for name, value in refresh.items() if name != "late"}, "stale": policies[late]}


def _with_method(body: dict[str, Any], method: Any) -> dict[str, Any]:
    """Return `body` with the method that its earlier keys for head, pool, hash tables and clusters imply."""
    if method == "rae":  # no earlier option implied this method
        return body
    head, negatives, order = ({**part} if isinstance(part := body.get(name), dict) else {} for name in _TELLING)
    kind, pool, lsh = head.pop("kind", None), negatives.get("pool"), negatives.get("lsh")
    hashed = lsh.get("hard") if isinstance(lsh, Mapping) else None  # labels per query from hash tables
    clustered = order.get("cluster", 1) != 1 or order.get("cluster_doubles_every", 0) != 0
    if kind == "label-encoder" or (kind is None and method in ("dexml", "ngame")):
        if not (kind or pool or clustered):
            return body
        goes_on = method == "ngame" and kind is None and pool != "all"
        method = "ngame" if clustered or goes_on else "dexml"
        told = method == "ngame" and pool == "batch"
    elif kind not in (None, "classifier"):
        raise ValueError(f"head.kind = {kind!r}: this key is now `method`; expected one of {', '.join(METHODS)}")
    else:
        told = pool in ("all", "batch")
        if told:
            method = "renee" if pool == "all" else "ngame-m2"
        elif hashed:
            method = "lns"
        elif kind and method == "ngame":
            method = "ngame-m2"
        elif kind or (pool and method in ("renee", "ngame-m2")) or (hashed == 0 and method == "lns"):
            method = "astra"
        else:
            return body
    if told:  # the counts of a pool without draws were zeros
        negatives = {key: value for key, value in negatives.items() if key != "pool" and (value or key not in _COUNTS)}
    if hashed == 0:
        del negatives["lsh"]
    body = {**body, "method": method, **({"negatives": negatives} if "negatives" in body else {})}
    empty = {name for name, part in (("head", head), ("classifier", body.get("classifier"))) if not part}
    return {name: part for name, part in {**body, "head": head}.items() if name not in empty}
