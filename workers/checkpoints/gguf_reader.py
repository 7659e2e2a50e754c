"""A reader of GGUF files that is quick with vocabularies."""

from __future__ import annotations

import numpy as np
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray


class QuickReader(GGUFReader):
    """Reads metadata as the library does, which takes seconds for a vocabulary: it maps every entry anew.

    An array of numbers is one part of its field, where the library has a part of some hundred bytes for each number.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[np.generic]], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start, entry, number = orig_offs + 12, GGUFValueType(kind[0]), int(count[0])
            if number and entry == GGUFValueType.STRING:
                parts, end = self._strings(start, number)
                places = range(3, 2 + 2 * number, 2)
                return end - orig_offs, [kind, count, *parts], list(places), [GGUFValueType.ARRAY, entry]
            if number and entry in self.gguf_scalar_to_np:
                values = self._get(start, self.gguf_scalar_to_np[entry], number).reshape(number)  # which may end early
                return 12 + int(values.nbytes), [kind, count, values], [2], [GGUFValueType.ARRAY, entry]
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings(self, start: int, number: int) -> tuple[list[NDArray[np.generic]], int]:
        """Return the lengths and the bytes of strings from an offset on, by turns, and the offset behind them."""
        data, parts = self.data.view(np.ndarray), list[NDArray[np.generic]]()
        length_type = np.dtype(np.uint64).newbyteorder(self.byte_order)
        for _ in range(number):
            length = data[start : start + 8].view(length_type)
            end = start + 8 + int(length[0])
            parts += (length, data[start + 8 : end])
            start = end
        return parts, start
