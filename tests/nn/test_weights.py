"""Row layouts against the loop they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.nn.weights import Part, RowLayout, plain_layout


@given(
    blocks=st.integers(1, 4),
    slot_rows=st.integers(1, 3),
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    columns=st.integers(1, 3),
    padding=st.integers(0, 2),
)
def test_every_row_lands_where_its_block_and_slot_say(blocks, slot_rows, slots, columns, padding):
    padding = min(padding, slot_rows - 1)
    parts = tuple(Part(blocks * count * slot_rows - padding, count) for count in slots)
    layout = RowLayout(blocks, slot_rows, parts, columns)
    buffer = np.zeros((layout.num_rows, columns + 1))
    tensors = [
        1.0 + np.arange(part.rows * columns).reshape(part.rows, columns) + 1000 * i
        for i, part in enumerate(parts)
    ]
    for i, tensor in enumerate(tensors):
        assert layout.part_shape(i, buffer.shape) == tensor.shape
        layout.place(buffer, i, tensor)
    rows = iter(buffer)
    for block in range(blocks):
        for count, tensor in zip(slots, tensors, strict=True):
            for row_idx in range(block * count * slot_rows, (block + 1) * count * slot_rows):
                row = next(rows)
                expected = tensor[row_idx] if row_idx < len(tensor) else np.zeros(columns)
                np.testing.assert_array_equal(row[:columns], expected)
                assert row[columns] == 0


def test_repeated_blocks_hold_the_same_rows():
    layout = RowLayout(4, 2, (Part(8), Part(4, repeat=2)))
    buffer = np.zeros(layout.num_rows)
    layout.place(buffer, 0, np.arange(8.0))
    layout.place(buffer, 1, np.arange(10.0, 14.0))
    expected = [[0, 1, 10, 11], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 12, 13]]
    np.testing.assert_array_equal(buffer.reshape(4, 4), expected)


def test_a_plain_layout_pads_rows():
    layout = plain_layout(5, multiple_of=4)
    buffer = np.zeros((layout.num_rows, 2))
    layout.place(buffer, 0, np.ones((5, 2)))
    np.testing.assert_array_equal(buffer.sum(axis=1), [2, 2, 2, 2, 2, 0, 0, 0])
