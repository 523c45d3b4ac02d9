# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, quickened: it does not work out again what it knows. Results stay the same,
bit for bit.

Nearly all the time of a small engine goes into Python around numpy's operations: types of blocks
are made, named, compared and checked at every one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


@functools.cache  # once: a second time would wrap what the first put there
def quicken() -> None:
    """Puts everything below in place."""
    _remap_once()
    _share_shapes()
    _remember_decisions()
    # The check for integer overflow does each addition three times over.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remap_once() -> None:
    """A launch remaps functions of `triton.language` from lists made once.

    Triton looks for them at every launch, and again at every call of one jitted function by
    another, inside a launch that has remapped them already.
    """
    modules = SimpleNamespace(__globals__={"tl": language, "core": core})
    patch_lang = interpreter._patch_lang
    checks_semantic = core.builtin(lambda: None).__code__
    remapped: dict[Any, list[tuple[str, Any]]] = {}

    def remap(member: Any) -> Any:
        """As `interpreter._patch_attr` does it, without the check that `_semantic` is given."""
        function, given = member, interpreter.interpreter_semantic
        if function.__code__ is checks_semantic:
            function = function.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = given
            return function(*args, **kwargs)

        return call

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in remapped:
            members = inspect.getmembers(pkg)
            remapped[pkg] = [(name, remap(fn)) for name, fn in members if core.is_builtin(fn)]
        for name, function in remapped[pkg]:
            scope.set_attr(pkg, name, function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda fn: patch_lang(modules)
    interpreter.InterpretedFunction.__call__ = call


class _Shape:
    """What all blocks of one shape share."""

    def __init__(self, ints: Any, numel: int) -> None:
        self.ints, self.numel = ints, numel
        self.constexprs = core.tuple([core.constexpr(size) for size in ints])
        self.numel_constexpr = core.constexpr(numel)
        self.types: dict[str, Any] = {}
        """Block types by the name of their elements' type, pointers left out."""
        self.constants: dict[Any, np.ndarray] = {}
        """Blocks of one number: by its Python type, value and element type."""


_shapes: dict[Any, _Shape] = {}
_no_dimension = _Shape(core.tuple([]), 1)


def _shared(type: Any) -> _Shape:
    return type.shared if type.is_block() else _no_dimension


def _share_shapes() -> None:
    """A shape is checked, and put into Triton's own tuples, once; block types are made once."""
    block, scalar = core.block_type, core.dtype
    make_block, to_ir, same_block = block.__init__, block.to_ir, block.__eq__
    constexpr, values_of = core.constexpr, core.tuple

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is values_of else shape
        key = tuple([size.value if type(size) is constexpr else size for size in sizes])
        shared = _shapes.get(key)
        if shared is None:
            make_block(self, element_ty, shape)
            shared = _shapes[key] = _Shape(self.shape, self.numel)
        self.element_ty = element_ty
        self.shape, self.numel, self.shared = shared.ints, shared.numel, shared

    def name(self: Any) -> str:
        return f"<{self.shape}, {self.element_ty}>"

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not scalar:
            return block(scalar_ty, self.shape)
        types = self.shared.types
        found = types.get(scalar_ty.name)
        if found is None:
            found = types[scalar_ty.name] = block(scalar_ty, self.shape)
        return found

    def to_ir_once(self: Any, builder: Any) -> Any:
        found = self.__dict__.get("ir")
        if found is None:
            found = self.ir = to_ir(self, builder)
        return found

    def is_same_block(self: Any, other: Any) -> bool:
        return self is other or same_block(self, other)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shared = _shared(type)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shared.constexprs, shared.numel_constexpr

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shared is other.shared:
            return lhs, rhs
        return broadcast_unlike(self, lhs, rhs)

    broadcast_unlike = semantic.TritonSemantic.broadcast_impl_value
    semantic.TritonSemantic.broadcast_impl_value = broadcast
    block.__init__, block.with_element_ty = init_block, with_element_ty
    block.name = functools.cached_property(name)  # most are never named
    block.name.__set_name__(block, "name")
    block.to_ir, block.__eq__ = to_ir_once, is_same_block
    core.tensor.__init__ = init_tensor


def _remember_decisions() -> None:
    """What follows from names of scalar types alone is decided once."""
    scalar, tensor, constexpr = core.dtype, core.tensor, core.constexpr
    same, np_dtype, unwrap = scalar.__eq__, interpreter._get_np_dtype, core._unwrap_if_constexpr
    integers = frozenset(scalar.SINT_TYPES + scalar.UINT_TYPES)
    floats = frozenset(scalar.FP_TYPES)
    np_dtypes: dict[str, Any] = {}
    computed: dict[Any, Any] = {}

    def is_same(self: Any, other: Any) -> bool:
        return self is other or same(self, other)

    def get_np_dtype(tt_dtype: Any) -> Any:
        if isinstance(tt_dtype, core.block_type):
            tt_dtype = tt_dtype.element_ty
        if type(tt_dtype) is not scalar:
            return np_dtype(tt_dtype)
        found = np_dtypes.get(tt_dtype.name)
        if found is None:
            found = np_dtypes[tt_dtype.name] = np_dtype(tt_dtype)
        return found

    def unwrap_if_constexpr(o: Any) -> Any:
        if type(o) is constexpr:
            return o.value
        return o if type(o) in plain else unwrap(o)

    plain = frozenset([int, float, bool, str, type(None), tensor, scalar, core.block_type])

    cls = semantic.TritonSemantic
    computation_type = cls.computation_type_impl
    check_types = cls.binary_op_type_checking_impl

    def remembered_type(
        self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div: bool
    ) -> Any:
        key = (a.name, a_scalar, b.name, b_scalar, div)
        found = computed.get(key)
        if found is None:
            found = computed[key] = computation_type(self, a, a_scalar, b, b_scalar, div)
        return found

    def with_number(self: Any, block: Any, number: Any, is_rhs: bool) -> Any:
        """Both operands of `block` and a number: the number as a block of the same type."""
        key = (type(number), number, block.dtype.name)
        constants = _shared(block.type).constants
        data = constants.get(key)
        if data is not None:
            return self.tensor(interpreter.TensorHandle(data, block.dtype), block.type)
        found = check_types(self, block, number) if is_rhs else check_types(self, number, block)
        one, other = found if is_rhs else reversed(found)
        if one is not block or other.type != block.type:
            return None  # the block becomes another type
        constants[key] = other.handle.data
        return other

    def is_number(value: Any) -> bool:
        """True if equal keys mean equal numbers: not for 0.0 and -0.0."""
        return type(value) is int or (type(value) is float and value != 0.0 and value == value)

    def is_block(value: Any) -> bool:
        return type(value) is tensor and type(value.dtype) is scalar

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if not div_or_mod and arithmetic_check:
            if is_block(lhs):
                if is_block(rhs):
                    if lhs.dtype is rhs.dtype:
                        return self.broadcast_impl_value(lhs, rhs)
                elif is_number(rhs) and (other := with_number(self, lhs, rhs, True)) is not None:
                    return lhs, other
            elif is_number(lhs) and is_block(rhs):
                other = with_number(self, rhs, lhs, False)
                if other is not None:
                    return other, rhs
        return check_types(
            self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    scalar.__eq__ = is_same
    scalar.is_int = lambda self: self.name in integers
    scalar.is_floating = lambda self: self.name in floats
    interpreter._get_np_dtype = get_np_dtype
    core._unwrap_if_constexpr = unwrap_if_constexpr
    cls.computation_type_impl = remembered_type
    cls.binary_op_type_checking_impl = checked
