"""Derivatives along many vectors at once: one forward pass is recorded on a tape, and traversed with K tangents.

This is Pearlmutter's R-operator (Fast exact multiplication by the Hessian, 1994). Let x' be the tangents of the
arguments of an operation, y' those of its result and g the gradient of the loss in it. A forward traversal propagates
the tangents through every operation, and a backward traversal the gradients and their tangents:

    push    y' = J x'                 pull    J'g  and  J'g'                 bend    (d J' / dx . x') g

Gauss-Newton products are `push` and the `pull` of K cotangents, Hessian products all three. Compared with nested
derivatives of torch, more is shared and less memory is moved: all vectors use the values and g of one gradient, whose
part in the weights is never computed; tangents are multiplied with a weight as one matrix of K times the rows;
gradients in the weights are summed directly in the image.

    tape      the two traversals
    writer    records the operations of a forward pass, below autograd
    rules     how each operation is differentiated; `layers`: those of some layers; `sinks`: where sums are accumulated
    factors   the Jacobian of few outputs, with which tangents need not be propagated from layer to layer
    kept      tapes of the batches of a risk, from one product to the next
"""

from .kept import Tapes
from .rules import Untaped
from .tape import Tape

__all__ = ["Tape", "Tapes", "Untaped"]
