"""From the hidden state of a prompt's last token to an embedding."""

from __future__ import annotations

from array import array

import numpy as np


def normalized(hidden: array[float]) -> np.ndarray:
    """Returns the state as a float32 vector of length 1; one of zeros stays as it is."""
    vector = np.array(hidden, np.float64)
    length = np.sqrt(vector @ vector)
    return (vector / length if length else vector).astype(np.float32)
