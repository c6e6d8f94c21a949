"""The part of a Lambda bundle that is the project's own.

Bundles carry third-party wheels for Lambda's machine (arm64, another Python), which cannot be
imported here. This Python has the same libraries installed; so a worker gets a view of the bundle
without what its wheels brought.
"""

import csv
import tempfile
from pathlib import Path


def own_code(bundle: Path, views: Path) -> Path:
    """A new folder in `views` of links to what in `bundle` no installed distribution owns; `bundle`
    itself when nothing is.
    """
    foreign = _owned_by_wheels(bundle)
    if not foreign:
        return bundle
    view = Path(tempfile.mkdtemp(prefix=f"{bundle.name}-", dir=views))
    for entry in bundle.iterdir():
        if entry.name not in foreign:
            (view / entry.name).symlink_to(entry)
    return view


def _owned_by_wheels(bundle: Path) -> set[str]:
    owned = set()
    for record in bundle.glob("*.dist-info/RECORD"):
        owned.add(record.parent.name)
        with record.open(encoding="utf-8", newline="") as rows:
            owned.update(row[0].split("/")[0] for row in csv.reader(rows) if row)
    return owned
