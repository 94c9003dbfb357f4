# SPDX-License-Identifier: Apache-2.0
"""Hand-made DLPack capsules that count how often they are deleted."""

from __future__ import annotations

import ctypes

import numpy as np

CPU, CUDA = 1, 2
FLOAT, INT, UINT = 2, 0, 1
READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

_alive = []  # callbacks must outlive the capsules, and those the test


class Producer:
    """An object with ``__dlpack__`` over a float32 NumPy array; ``deleted`` counts calls of the deleter.

    ``again`` hands out the same capsule each time, as a broken producer would; ``says`` is what
    ``__dlpack_device__`` gives instead of the capsule's device; ``strides`` and ``shape`` replace the array's.
    """

    def __init__(
        self,
        array,
        *,
        versioned=True,
        dtype=(FLOAT, 32, 1),
        device=(CPU, 0),
        version=(1, 0),
        flags=0,
        strides=True,
        shape=None,
        byte_offset=0,
        again=False,
        says=None,
    ):
        self.array, self.deleted, self.again, self.kept = array, 0, again, None
        self.device = device if says is None else says
        shape = (ctypes.c_int64 * array.ndim)(*(array.shape if shape is None else shape))
        given = isinstance(strides, tuple)
        steps = strides if given else tuple(s // array.itemsize for s in array.strides)
        steps = (ctypes.c_int64 * array.ndim)(*steps)
        tensor = _Tensor(array.ctypes.data - byte_offset, device, array.ndim, dtype, shape, None, byte_offset)
        if strides:
            tensor.strides = steps
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        deleter = _Deleter(self._delete)
        if versioned:
            self.managed = _Versioned(*version, None, deleter, flags, tensor)
        else:
            self.managed = _Managed(tensor, None, deleter)
        self.destructor = _Destructor(self._destroy)
        _alive.append((self.managed, self.destructor, deleter, shape, steps, array))

    def _delete(self, _):
        self.deleted += 1

    def _destroy(self, capsule):
        if _is_valid(capsule, self.name):  # nobody consumed it
            self.deleted += 1

    def capsule(self):
        return _new(ctypes.addressof(self.managed), self.name, self.destructor)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if not self.again:
            return self.capsule()
        if self.kept is None:
            self.kept = self.capsule()
        return self.kept

    def __dlpack_device__(self):
        return self.device


class OldProducer:
    """``__dlpack__`` as before versions: it takes nothing but a stream."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
