"""Ladders of compiled sizes: how many rows decode together, how many slots each has."""

from fastgrpo_jax import base


def row_ladder(rows: int, asked: str = "", multiple: int = 1) -> tuple[int, ...]:
    """List the compiled row counts, ascending, the whole rollout's `rows` always the last.

    `asked` is a comma-separated list, or empty for the powers of two below `rows`. All are rounded
    up to a `multiple`, so that devices which cut them get equal parts; seats beyond stay empty.

    Raises:
      UserError: if `asked` is not a list of positive integers.
    """
    if not asked:
        sizes = {2**i for i in range(rows.bit_length())}
    else:
        try:
            sizes = {int(x) for x in asked.split(",")}
        except ValueError:
            sizes = {0}
        if min(sizes) < 1:
            raise base.UserError(
                f"rollout.row_buckets is {asked!r}; allowed: positive integers, comma-separated"
            )
    *sizes, rows = (-(-x // multiple) * multiple for x in (*sizes, rows))
    return (*sorted({x for x in sizes if x < rows}), rows)


def slot_ladder(longest: int, step: int) -> tuple[int, ...]:
    """List the slot counts up to one that holds `longest`: multiples of `step`, growing by
    about half each time, so that their number grows with the logarithm of the length."""
    sizes = [step]
    while sizes[-1] < longest:
        n = sizes[-1] // step
        sizes.append((n + max(1, n // 2)) * step)
    return tuple(sizes)


def at_least(ladder: tuple[int, ...], size: int) -> int:
    """Return the smallest step of a ladder that is not below `size`."""
    for x in ladder:
        if x >= size:
            return x
    raise ValueError(f"{size} is above the ladder {ladder}")


def below(ladder: tuple[int, ...], size: int) -> int:
    """Return the largest step of a ladder below `size`, or 0."""
    return max((x for x in ladder if x < size), default=0)
