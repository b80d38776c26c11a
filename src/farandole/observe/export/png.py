"""Small pictures without a drawing library: rectangles, a tiny alphabet, PNG."""

from __future__ import annotations

import struct
import zlib

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)
INK: Colour = (51, 51, 51)
SCALE = 2
LETTER_WIDTH, LETTER_HEIGHT = 4 * SCALE, 5 * SCALE

# Three columns, five rows; each digit of the octal number is a row from the top.
_LETTERS = {
    "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644", "G": "34553",
    "H": "55755", "I": "72227", "J": "11153", "K": "55655", "L": "44447", "M": "57755", "N": "65555",
    "O": "25552", "P": "65644", "Q": "25563", "R": "65655", "S": "34216", "T": "72222", "U": "55557",
    "V": "55552", "W": "55775", "X": "55255", "Y": "55222", "Z": "71247", "0": "75557", "1": "26227",
    "2": "61247", "3": "61216", "4": "55711", "5": "74616", "6": "34757", "7": "71222", "8": "75757",
    "9": "75716", ".": "00002", "%": "51245", ":": "02020", "/": "11244", "-": "00700", "(": "24442", ")": "21112",
}  # fmt: skip


class Picture:
    """Pixels of `width` x `height`, white at first."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(bytes(WHITE) * width) for _ in range(height)]

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """Fill from `left`, `top` to before `right`, `bottom`; what is outside is left out."""
        begin, end = max(0, round(left)), min(self.width, round(right))
        for row in range(max(0, round(top)), min(self.height, round(bottom))):
            if end > begin:
                self._rows[row][3 * begin : 3 * end] = bytes(colour) * (end - begin)

    def text(self, left: float, top: float, text: str, colour: Colour = INK) -> None:
        """Write in capitals; what the alphabet has not is a blank."""
        for i, letter in enumerate(text.upper()):
            for row, bits in enumerate(_LETTERS.get(letter, "00000")):
                for column in range(3):
                    if int(bits) >> (2 - column) & 1:
                        x, y = left + i * LETTER_WIDTH + column * SCALE, top + row * SCALE
                        self.rectangle(x, y, x + SCALE, y + SCALE, colour)

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows), 9)
        pieces = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_piece(name, data) for name, data in pieces)


def _piece(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def text_width(text: str) -> int:
    """Return how many pixels a text takes."""
    return len(text) * LETTER_WIDTH
