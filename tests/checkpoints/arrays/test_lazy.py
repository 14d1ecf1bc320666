"""Views of lazy arrays against the same views of numpy arrays, any region of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jserve.checkpoints.arrays.lazy import LazyArray


def lazy(values):
    """Read by regions only, each as it is asked for."""
    return LazyArray(shape=values.shape, dtype=values.dtype, read_region=lambda region: values[region].copy())


def numbers(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


BASE = numbers(6, 4, 10)
VIEWS = {
    "itself": (lazy(BASE), BASE),
    "transposed": (lazy(BASE).transposed((2, 0, 1)), BASE.transpose(2, 0, 1)),
    "part": (lazy(BASE).part(1, 1, 3), BASE[:, 1:3]),
    "at": (lazy(BASE).at(1, 2), BASE[:, 2]),
    "at the last axis": (lazy(BASE).at(2, 9), BASE[..., 9]),
    "split": (lazy(BASE).split(0, (2, 3)), BASE.reshape(2, 3, 4, 10)),
    "split in three": (lazy(numbers(2, 24)).split(1, (2, 3, 4)), numbers(2, 2, 3, 4)),
    "merged": (lazy(BASE).merged(0, 2), BASE.reshape(24, 10)),
    "merged at the end": (lazy(BASE).merged(1, 2), BASE.reshape(6, 40)),
    "plus": (lazy(BASE).plus(-1.0), BASE - 1),
    "stack": (LazyArray.stack([lazy(BASE), lazy(BASE + 1)]), np.stack([BASE, BASE + 1])),
    "in memory": (LazyArray.of(BASE), BASE),
    "paired": (
        lazy(BASE).paired(2),
        np.concatenate([BASE[..., 0::2], BASE[..., 1::2]], axis=-1),
    ),
    "a chain": (
        lazy(numbers(24, 8)).part(0, 8, 24).split(0, (4, 4)).paired(1).transposed((2, 0, 1)),
        np.concatenate([numbers(24, 8)[8:].reshape(4, 4, 8)[:, 0::2], numbers(24, 8)[8:].reshape(4, 4, 8)[:, 1::2]], 1)
        .transpose(2, 0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@given(data=st.data())
def test_any_region_of_any_view(name, data):
    view, values = VIEWS[name]
    assert view.shape == values.shape
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in values.shape]
    region = tuple(slice(start, stop) for start, stop in bounds)
    got = view.read(region)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, values[region])


def test_the_whole_is_the_default():
    view, values = VIEWS["a chain"]
    np.testing.assert_array_equal(view.read(), values)


def test_only_what_was_asked_for_is_read():
    asked = []
    base = LazyArray(
        shape=(8, 6), dtype=np.dtype(np.float32), read_region=lambda region: asked.append(region) or BASE[0][region]
    )
    base.split(0, (4, 2)).transposed((2, 0, 1)).at(0, 3).part(0, 1, 3).read((slice(0, 1), slice(None)))
    assert asked == [(slice(2, 4), slice(3, 4))]


def test_pieces_are_rows_in_their_order():
    values = np.arange(48, dtype=np.int32).reshape(12, 4)
    for most, count in ((16, 12), (50, 4), (1, 12), (1000, 1)):
        pieces = list(LazyArray.of(values).pieces(most))
        assert len(pieces) == count
        np.testing.assert_array_equal(np.concatenate(pieces), values)
    assert [piece.shape for piece in LazyArray.of(np.ones(())).pieces(1)] == [()]
    assert [piece.shape for piece in LazyArray.of(np.ones((0, 3))).pieces(1)] == [(0, 3)]


def test_what_is_read_of_an_array_in_memory_is_a_copy():
    values = np.zeros((2, 2))
    read = LazyArray.of(values).read()
    read[...] = 1
    assert not values.any()


def test_concatenated_reads_what_is_asked_for_only():
    asked = []

    def part(rows, start):
        values = np.arange(start, start + 2 * rows).reshape(rows, 2)

        def read(region):
            asked.append((start, region[0]))
            return values[region]

        return LazyArray(shape=values.shape, dtype=values.dtype, read_region=read)

    whole = LazyArray.concatenated([part(3, 0), part(1, 6), part(2, 8)], 0)
    np.testing.assert_array_equal(whole.read(), np.arange(12).reshape(6, 2))
    asked.clear()
    np.testing.assert_array_equal(whole.read((slice(3, 5), slice(1, 2))), [[7], [9]])
    assert asked == [(6, slice(0, 1)), (8, slice(0, 1))]
    assert whole.read((slice(2, 2), slice(None))).shape == (0, 2)
