# SPDX-License-Identifier: Apache-2.0
"""Compare src/cpp/python/xla_ffi_abi.h with the headers of the installed jaxlib: sizes, offsets and numbers.

python scripts/check_xla_abi.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Our struct, XLA's, and our fields with XLA's names for them.
STRUCTS = {
    ("Extension", "ExtensionBase"): {"type": "type", "next": "next"},
    ("ApiVersion", "XLA_FFI_Api_Version"): {"major": "major_version", "minor": "minor_version"},
    ("ErrorCreateArgs", "XLA_FFI_Error_Create_Args"): {"message": "message", "code": "errc"},
    ("Buffer", "XLA_FFI_Buffer"): {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ("ByteSpan", "XLA_FFI_ByteSpan"): {"data": "ptr", "size": "len"},
    ("Scalar", "XLA_FFI_Scalar"): {"dtype": "dtype", "value": "value"},
    ("Buffers", "XLA_FFI_Args"): {"size": "size", "types": "types", "buffers": "args"},
    ("Attributes", "XLA_FFI_Attrs"): {"size": "size", "types": "types", "names": "names", "values": "attrs"},
    ("StreamGetArgs", "XLA_FFI_Stream_Get_Args"): {"context": "ctx", "stream": "stream"},
    ("DeviceOrdinalGetArgs", "XLA_FFI_DeviceOrdinal_Get_Args"): {
        "context": "ctx",
        "ordinal": "device_ordinal",
    },
}
#: The same for structs that XLA may append to: offsets alone.
GROWING = {
    ("Metadata", "XLA_FFI_Metadata"): {"version": "api_version", "traits": "traits"},
    ("MetadataExtension", "XLA_FFI_Metadata_Extension"): {"metadata": "metadata"},
    ("CallFrame", "XLA_FFI_CallFrame"): {
        "api": "api",
        "context": "ctx",
        "stage": "stage",
        "arguments": "args",
        "results": "rets",
        "attributes": "attrs",
    },
    ("Api", "XLA_FFI_Api"): {
        "create_error": "XLA_FFI_Error_Create",
        "get_stream": "XLA_FFI_Stream_Get",
        "get_device_ordinal": "XLA_FFI_DeviceOrdinal_Get",
    },
}
NUMBERS = {
    **{
        f"DataType::{name}": f"XLA_FFI_DataType_{name.upper()}"
        for name in ("pred", "s8", "s32", "s64", "f8e4m3fn")
    },
    **{f"DataType::{name}": f"XLA_FFI_DataType_{name.upper()}" for name in ("f16", "bf16", "f32", "f64")},
    **{
        f"ErrorCode::{name}": f"XLA_FFI_Error_Code_{name.upper()}"
        for name in ("invalid_argument", "resource_exhausted", "out_of_range", "internal")
    },
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kBufferArgument": "XLA_FFI_ArgType_BUFFER",
    "kScalarAttribute": "XLA_FFI_AttrType_SCALAR",
    "kStringAttribute": "XLA_FFI_AttrType_STRING",
    "kMajorVersion": "XLA_FFI_API_MAJOR",
}


def program() -> str:
    """Write the assertions."""
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi_abi.h"']
    lines += ["#include <type_traits>", "namespace ours = tiledattn::xla;"]
    # Its own name differs between versions.
    lines.append("using ExtensionBase = std::remove_pointer_t<decltype(XLA_FFI_Buffer::extension_start)>;")
    for our, theirs in STRUCTS:
        lines.append(f"static_assert(sizeof(ours::{our}) == sizeof({theirs}));")
    for (our, theirs), fields in {**STRUCTS, **GROWING}.items():
        for field, name in fields.items():
            lines.append(f"static_assert(offsetof(ours::{our}, {field}) == offsetof({theirs}, {name}));")
    for our, theirs in NUMBERS.items():
        lines.append(f"static_assert(static_cast<int>(ours::{our}) == static_cast<int>({theirs}));")
    lines.append("static_assert(ours::kMinorVersion <= XLA_FFI_API_MINOR);")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile them."""
    import jax.ffi
    import jaxlib

    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "abi.cpp"
        source.write_text(program())
        include = [f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'src/cpp/python'}"]
        done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", *include, source], check=False)
    if done.returncode == 0:
        print(f"src/cpp/python/xla_ffi_abi.h agrees with jaxlib {jaxlib.__version__}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
