"""Charts as inline SVG in a frame of HTML labels: text keeps its size on a phone, shapes stretch to the width.

Every chart is of bounded size, whatever the length of the run; colours are classes of the page's style sheet.
Each function takes plain numbers and returns `markupsafe.Markup`; all names it is given are escaped.
"""

from __future__ import annotations
