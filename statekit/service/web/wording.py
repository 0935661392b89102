"""Times, lengths and large numbers, as people say them."""

from __future__ import annotations

from datetime import UTC, datetime


def age(moment: datetime, now: datetime | None = None) -> str:
    """Returns how long ago something was, for people.

    Example:
        >>> age(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, 1, tzinfo=UTC))
        '2 d ago'
    """
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    for length, unit in ((365.25 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "now"


def duration(seconds: float) -> str:
    """Returns a length of time for people.

    Example:
        >>> duration(0.04), duration(75), duration(7261)
        ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {int(seconds % 60)} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int) -> str:
    """Returns a large number for people.

    Example:
        >>> count(1_234_567), count(999)
        ('1.23 M', '999')
    """
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
