"""Figures of several panels."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def row_of_axes(count: int, width: float = 5.0, height: float = 3.4) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` panels side by side, or a message about what to install.

    Example:
        >>> figure, axes = row_of_axes(2)
        >>> len(axes), int(figure.get_figwidth())
        (2, 10)
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ritz[plot]'") from error
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
