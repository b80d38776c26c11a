"""``python -m tests.style``: write tables and diagrams of docs, strike off what is mended, lower ceilings.

``python -m tests.style --as-found`` puts every violation of today on the list: after files have moved, when the
names on the list are others. The difference is to be looked at: the list may only shrink.
"""

from __future__ import annotations

import sys

from tests.style import api_rows, rule_rows, tables
from tests.style.ceilings import lower, sizes
from tests.style.diagrams import write_diagrams
from tests.style.tables import known_violations, source, write_known

before = known_violations()
tables.TABLES.write(tables.house_tables())
rule_rows.TABLE.write(rule_rows.rows())
api_rows.TABLES.write(api_rows.tables())
write_diagrams()
lower(sizes(source()))
write_known(as_found="--as-found" in sys.argv[1:])
for rule, violations in known_violations().items():
    print(f"{rule}: {len(violations)} known (before: {len(before.get(rule, {}))})")
