"""Writes `grids.bin`, the grids of the I-quants, from the tables of ggml's `gguf` package.

    python make_grids.py OUT_FILE       # gguf 0.17 or newer

A point of a grid is two bytes, the lowest first: the numbers of the values of its eight columns in
two bits each, or of its four columns in four bits each, the first column lowest.
"""

import sys

import numpy
from gguf import quants

GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ3_XXS", "IQ3_S"]


def packed(kind):
    kind.init_grid()
    points = kind.grid.reshape(kind.grid_shape)
    numbers = numpy.searchsorted(numpy.array(kind.grid_map), points)
    columns = kind.grid_shape[1]
    places = numpy.arange(columns) * (16 // columns)
    return (numbers << places).sum(axis=1).astype("<u2").tobytes()


with open(sys.argv[1], "wb") as out:
    for name in GRIDS:
        out.write(packed(getattr(quants, name)))
