"""``python -m tests.style``: write tables and diagrams of docs, strike off what is mended, lower ceilings.

``python -m tests.style --as-found`` puts every violation of today on the list: after files have moved, when the
names on the list are others. The difference is to be looked at: the list may only shrink.
"""

from __future__ import annotations

import sys

from tests.style.api_rows import write_tables_of_names
from tests.style.ceilings import lower, sizes
from tests.style.diagrams import write_diagrams
from tests.style.rule_rows import write_rows
from tests.style.tables import known_violations, source, write_known, write_tables

before = known_violations()
write_tables()
write_rows()
write_tables_of_names()
write_diagrams()
lower(sizes(source()))
write_known(as_found="--as-found" in sys.argv[1:])
for rule, violations in known_violations().items():
    print(f"{rule}: {len(violations)} known (before: {len(before.get(rule, {}))})")
