"""The soft overlong penalty of DAPO (arXiv 2503.14476, equation 13)."""

import numpy as np
from jaxtyping import Float, Int


def penalty(
    lengths: Int[np.ndarray, " N"], limits: Int[np.ndarray, " N"], buffer: int
) -> Float[np.ndarray, " N"]:
    """Punish responses that come near their limit, all in tokens.

        0 up to limit - buffer, then (limit - buffer - length) / buffer, so -1 at the limit

    A limit below the buffer shortens it.
    """
    room = np.minimum(buffer, limits)
    return -np.clip(lengths - (limits - room), 0, room) / room
