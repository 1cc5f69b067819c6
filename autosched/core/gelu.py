"""GELU by the hyperbolic tangent, as section 2 of Hendrycks and Gimpel, arXiv:1606.08415, has it, spelled with a sigmoid.

``1 + tanh(y)`` is ``2 * sigmoid(2 y)``. So half of x times that is x times the sigmoid of ``x * (LINEAR + CUBIC * x ** 2)``.
"""

from __future__ import annotations

import math

LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = 0.044715 * LINEAR
