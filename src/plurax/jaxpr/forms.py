"""The form of a value of attention: how it depends on sums over keys that are not known yet.

A statistic is known only after the last block, and weights read statistics. So the form of a value
says how it depends on them:

    free      on none
    log       free ± z ± ...                       z a statistic, such as -m or -log l
    weight    free × exp(± z ± ...) × d ** ± 1     d a statistic, such as 1 / l

On a block, a weight is computed with other numbers for z and d, and sums of it are corrected after
the last block by a factor for each query. A value of no such form, like p², is refused.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from plurax.jaxpr.compat import ELEMENTWISE, LINEAR, REDUCTIONS

KEPT = frozenset(["broadcast_in_dim", "reshape", "squeeze", "transpose"])
"""Operations that move entries, and may keep a dim as it is."""

EXTREMES = {"reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}
"""Reductions whose results over blocks are combined by an elementwise operation of this name."""

UNARY = LINEAR | {"stop_gradient", "reduce_precision"}
"""Elementwise operations after which a value has the form that it had."""

NO_WEIGHT = -1e4
"""`exp` of this, and of what is less, is zero in every dtype."""


class NotFollowedError(Exception):
    """Why a dim cannot be followed.

    **Fields:** `eqn`, the equation at fault; `reason`, what is wrong with it; `reductions`, how
    often the dim was reduced before, as keys are and queries are not.
    """

    reductions = 0

    def __init__(self, eqn: Any, reason: str) -> None:
        super().__init__(reason)
        self.eqn, self.reason = eqn, reason


@dataclasses.dataclass(frozen=True)
class Form:
    """How a value with the followed dim depends on statistics (see the module).

    **Fields:** `name`, `free`, `log` or `weight`; `terms`, the statistics that were added to the
    value before its exponential was taken, and their signs; `factors`, those by which it was
    multiplied, and their exponents.
    """

    name: str
    terms: tuple[tuple[Any, int], ...] = ()
    factors: tuple[tuple[Any, int], ...] = ()


FREE = Form("free")


class Forms:
    """The forms of the values with the followed dim, as they become known.

    **Attributes:**

    - `forms`: of each variable that has the dim.
    - `statistics`: the variables that depend on what was reduced.
    - `stand_ins`: by the `id` of an equation and the place of a statistic among its operands, what
      a block reads in its place: `("shift", sign)` for the maximum, `("constant", 0 or 1)`.
    - `shifted`: the variable of which the running maximum is taken; None where nothing is shifted.
    - `producer`: of each variable the equation that computes it.
    """

    def __init__(self, eqns: Sequence[Any]) -> None:
        self.producer = {var: eqn for eqn in eqns for var in eqn.outvars}
        self.forms: dict[Any, Form] = {}
        self.statistics: set[Any] = set()
        self.stand_ins: dict[tuple[int, int], tuple[str, int]] = {}
        self.shifted: Any = None

    def of(self, eqn: Any, *, ends: bool) -> Form:
        """Return the form of an equation's result; of what is reduced, where the dim `ends`.

        Raises `NotFollowedError` where it has none.
        """
        name = eqn.primitive.name
        if name in ELEMENTWISE:
            return self._elementwise(eqn)
        if name in KEPT:
            return self.forms[eqn.invars[0]]
        if name in REDUCTIONS:
            return self._reduced(eqn, ends)
        if name == "dot_general":
            return self._product(eqn)
        if name == "concatenate":
            reason = (
                "it joins the keys and others. An attention sink is one more term of the divisor: "
                "write exp(s - m) / (exp(s - m).sum(-1) + exp(sink - m)), where m is the larger of "
                "jax.lax.stop_gradient(s.max(-1)) and the sink's"
            )
            raise NotFollowedError(eqn, reason)
        raise NotFollowedError(eqn, "there is no rule for it")

    def is_other(self, atom: Any) -> bool:
        """Whether an operand has neither the dim nor depends on a statistic."""
        return isinstance(atom, Literal) or not (atom in self.forms or atom in self.statistics)

    def _elementwise(self, eqn: Any) -> Form:
        """Return the form of the result of an elementwise operation."""
        name, atoms = eqn.primitive.name, eqn.invars
        forms = [None if isinstance(a, Literal) else self.forms.get(a) for a in atoms]
        statistics = [p for p, a in enumerate(atoms) if not self.is_other(a) and forms[p] is None]
        present = [form for form in forms if form is not None]
        if not statistics and all(form == FREE for form in present):
            return FREE
        if name in UNARY:
            return present[0]
        if name == "exp" and present[0].name == "log":
            return Form("weight", present[0].terms, present[0].factors)
        if name in ("add", "sub", "add_any"):
            return self._added(eqn, forms, statistics)
        if name in ("mul", "div"):
            return self._scaled(eqn, forms, statistics)
        if name == "neg" and present[0].name == "weight":
            return present[0]
        if name == "select_n" and not statistics and forms[0] in (None, FREE):
            return self._selected(eqn, forms)
        raise NotFollowedError(eqn, "what it computes is no softmax of its operands")

    def _added(self, eqn: Any, forms: list[Form | None], statistics: list[int]) -> Form:
        """Return the form of a sum: of a value and a statistic, or of two values of one form."""
        first = next(form for form in forms if form is not None)
        sign = -1 if eqn.primitive.name == "sub" else 1
        if len(statistics) == 1 and first.name != "weight" and (sign > 0 or statistics == [1]):
            place = statistics[0]
            shift = first == FREE
            if shift and self.shifted is None:
                self.shifted = eqn.invars[1 - place]
            # A block is shifted by the maximum so far, once.
            self.stand_ins[id(eqn), place] = ("shift", sign) if shift else ("constant", 0)
            return Form("log", (*first.terms, (eqn.invars[place], sign)), first.factors)
        if not statistics:
            if forms[0] == forms[1]:
                if first.name == "weight":
                    return first
            elif first.name == "log" and (forms[0] is first or sign > 0):
                if {form for form in forms if form is not None} <= {first, FREE}:
                    return first
            elif None in forms and all(
                form is not None or self._constant(atom) == 0
                for form, atom in zip(forms, eqn.invars, strict=True)
            ):
                return first
        way = "weights of two softmaxes are multiplied with the values first, w @ v - u @ v"
        raise NotFollowedError(eqn, f"it adds to weights what is none, or to a statistic; {way}")

    def _scaled(self, eqn: Any, forms: list[Form | None], statistics: list[int]) -> Form:
        """Return the form of a product or a quotient."""
        left, right = forms
        exponent = -1 if eqn.primitive.name == "div" else 1
        if len(statistics) == 1 and (statistics == [1] or exponent > 0):
            place = statistics[0]
            value = forms[1 - place]
            if value is not None and value.name != "log":
                self.stand_ins[id(eqn), place] = ("constant", 1)
                factor = (eqn.invars[place], exponent)
                return Form("weight", value.terms, (*value.factors, factor))
        if not statistics:
            if left is not None and left.name == "weight" and right in (None, FREE):
                return left
            swapped = exponent > 0 and left in (None, FREE)
            if swapped and right is not None and right.name == "weight":
                return right
        raise NotFollowedError(eqn, "its result is not linear in the weights")

    def _selected(self, eqn: Any, forms: list[Form | None]) -> Form:
        """Return the form of `where`: weights or zero, or logarithms or what has no weight."""
        cases = list(zip(forms[1:], eqn.invars[1:], strict=True))
        kept = {form for form, _ in cases if form is not None and form != FREE}
        if len(kept) == 1:
            (form,) = kept
            for other, atom in cases:
                if other != form and not self._has_no_weight(atom, form):
                    break
            else:
                return form
        raise NotFollowedError(eqn, "it selects between weights and what is none")

    def _reduced(self, eqn: Any, ends: bool) -> Form:
        """Return the form of what a reduction reduces."""
        form, name = self.forms[eqn.invars[0]], eqn.primitive.name
        if form == FREE and (not ends or name in EXTREMES or name == "reduce_sum"):
            return form
        if form.name == "weight" and name == "reduce_sum":
            return form
        raise NotFollowedError(eqn, "weights can only be summed")

    def _product(self, eqn: Any) -> Form:
        """Return the form of a product's result."""
        forms = [None if isinstance(a, Literal) else self.forms.get(a) for a in eqn.invars]
        if all(self.is_other(a) or a in self.forms for a in eqn.invars):
            special = [form for form in forms if form is not None and form != FREE]
            if not special:
                return FREE
            if len(special) == 1 and special[0].name == "weight":
                return special[0]
        raise NotFollowedError(eqn, "its result is not linear in the weights")

    def _has_no_weight(self, atom: Any, form: Form) -> bool:
        """Whether a constant beside values of a form means a weight of zero."""
        value = self._constant(atom)
        return value is not None and (value == 0 if form.name == "weight" else value <= NO_WEIGHT)

    def _constant(self, atom: Any) -> float | None:
        """Return the value of a scalar constant, also one that was broadcast; None of others."""
        while not isinstance(atom, Literal):
            eqn = self.producer.get(atom)
            name = None if eqn is None else eqn.primitive.name
            if eqn is None or name not in ("broadcast_in_dim", "convert_element_type"):
                return None
            atom = eqn.invars[0]
        return float(atom.val) if np.ndim(atom.val) == 0 else None
