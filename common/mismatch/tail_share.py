"""Share of a bin's tokens with alpha below a threshold, with its uncertainty, as six running sums.

Testing a quantile needs no stored values: p_q < tau means that more than a share q of the tokens
has alpha < tau. So the interval of a quantile is the inverted interval of a share (Woodruff, 1952,
"Confidence intervals for medians and other position measures"). Tokens of one sequence depend on
each other, and so do the samples of one prompt: prompts are the independent units.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

MIN_UNITS = 3.0
"""With fewer (effective) units, nothing is known about the spread between units."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Share of tokens with alpha below a threshold, over units (prompts) of decaying weight w.

        share    = sum w x / sum w n          unit: n tokens, x of them below the threshold
        m        = (sum w n)^2 / sum (w n)^2                      effective number of units
        variance = max(m / (m - 1) sum w^2 (x - share n)^2, q (1 - q) sum w^2 n) / (sum w n)^2

    The second term is the variance of independent tokens at the share q that is tested. It keeps a
    sample without any token below the threshold from being certain. Only the six sums are stored.
    """

    wn: float = 0.0
    wx: float = 0.0
    w2n: float = 0.0
    w2nn: float = 0.0
    w2nx: float = 0.0
    w2xx: float = 0.0

    def add(self, n_G: np.ndarray, x_G: np.ndarray, decay: float) -> Share:
        """Multiply older weights by `decay`, then add units with n_G tokens, x_G of them below."""
        n, x = np.asarray(n_G, np.float64), np.asarray(x_G, np.float64)
        return Share(
            wn=decay * self.wn + float(n.sum()),
            wx=decay * self.wx + float(x.sum()),
            w2n=decay**2 * self.w2n + float(n.sum()),
            w2nn=decay**2 * self.w2nn + float(n @ n),
            w2nx=decay**2 * self.w2nx + float(n @ x),
            w2xx=decay**2 * self.w2xx + float(x @ x),
        )

    @property
    def share(self) -> float:
        """The point estimate; 0 without tokens."""
        return self.wx / self.wn if self.wn else 0.0

    def interval(self, q: float, z: float) -> tuple[float, float]:
        """share -+ t sqrt(variance); t has m - 1 degrees of freedom and the tail of a normal z."""
        m = self.wn**2 / self.w2nn if self.w2nn else 0.0
        if m < MIN_UNITS:
            return 0.0, 1.0
        p = self.share
        between = m / (m - 1) * (self.w2xx - 2 * p * self.w2nx + p**2 * self.w2nn)
        variance = max(between, q * (1 - q) * self.w2n) / self.wn**2
        half = student(z, m - 1) * math.sqrt(variance)
        return p - half, p + half


def student(z: float, df: float) -> float:
    """Quantile of Student's t with df (>= 2) degrees of freedom at the tail of a standard normal z.

        t = sqrt(df (exp((z (8 df + 3) / (8 df + 1))^2 / df) - 1))

    Wallace (1959); within 7 % for z <= 3 and df >= 3, too large rather than too small.
    """
    scaled = z * (8 * df + 3) / (8 * df + 1)
    return math.sqrt(df * math.expm1(scaled**2 / df))
