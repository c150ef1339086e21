"""Amounts and shares as people read them."""

from __future__ import annotations


def usd_text(usd: float) -> str:
    """Return an amount with cents, or where it is small, with three digits that count.

    Example:
        >>> usd_text(1234.5), usd_text(0.01234)
        ('1,234.50 USD', '0.0123 USD')
    """
    return f"{usd:,.2f} USD" if abs(usd) >= 1 or usd == 0 else f"{usd:.3g} USD"


def percent_text(share: float) -> str:
    """Return a difference as a share in percent with its sign, with a decimal where it is small.

    Example:
        >>> percent_text(0.034), percent_text(-0.285)
        ('+3.4%', '-28%')
    """
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+,.0%}"
