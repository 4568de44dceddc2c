"""Terminal that a test writes to: the few control sequences of a table below a cursor."""

from __future__ import annotations

import io
import re

_PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b([D78])|\x1b\[[\d;]*m|([\r\n])|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """Screen of `height` lines, of any width, that scrolls; what leaves it is in `gone`."""

    def __init__(self, height: int = 24) -> None:
        super().__init__()
        self.gone: list[str] = []
        self._screen = [""] * height
        self._row = self._column = 0
        self._saved = (0, 0)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for number, letter, single, move, plain in _PART.findall(
            re.sub(r"\x1b\[[\d;]*m", "", text)
        ):
            if plain:
                line = self._screen[self._row].ljust(self._column)
                end = self._column + len(plain)
                self._screen[self._row] = line[: self._column] + plain + line[end:]
                self._column = end
            elif move == "\r":
                self._column = 0
            elif move == "\n" or single == "D":
                self._down()
                self._column = 0 if move else self._column
            elif single == "7":
                self._saved = self._row, self._column
            elif single == "8":
                self._row, self._column = self._saved
            elif letter == "A":
                self._row = max(0, self._row - int(number))
            elif letter == "J":
                self._screen[self._row] = self._screen[self._row][: self._column]
                for row in range(self._row + 1, len(self._screen)):
                    self._screen[row] = ""
        return len(text)

    def _down(self) -> None:
        if self._row + 1 < len(self._screen):
            self._row += 1
        else:
            self.gone.append(self._screen.pop(0))
            self._screen.append("")

    @property
    def text(self) -> str:
        """All lines, those that have left the screen too."""
        return "\n".join(line.rstrip() for line in (*self.gone, *self._screen)).rstrip("\n")
