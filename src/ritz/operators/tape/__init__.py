"""Derivatives along many vectors at once: one forward pass is written down, and walked with K tangents.

This is Pearlmutter's R-operator (Fast exact multiplication by the Hessian, 1994). Let x' be the tangents of the
arguments of an operation, y' those of its result and g the gradient of the loss in it. A walk ahead takes the tangents
through every operation, and a walk back the gradients and theirs:

    push    y' = J x'                 pull    J'g  and  J'g'                 bend    (d J' / dx . x') g

Gauss-Newton products are `push` and the `pull` of K cotangents, Hessian products all three. Against derivatives that
torch nests, this shares more and moves less: values and g are those of one gradient for all vectors, of which the part
in the weights is never taken; tangents are multiplied with a weight as one matrix of K times the rows; gradients in the
weights are added up where they lie in the image.

    tape      the two walks
    writer    writes the operations of a forward pass down, below autograd
    rules     how each operation is differentiated, `layers` those of some layers, `sinks` where sums are gathered
    factors   the Jacobian of few outputs, for which tangents need not go from layer to layer
    kept      tapes of the batches of a risk, from one product to the next
"""

from .kept import Tapes
from .rules import Untaped
from .tape import Tape

__all__ = ["Tape", "Tapes", "Untaped"]
