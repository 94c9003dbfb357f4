# SPDX-License-Identifier: Apache-2.0
"""Check that the layers of the C++ code include in one direction only.

include <- core <- {cpu, cuda} <- python. The core knows the backends through the factory functions in backend.h alone.
Device code in src/cuda/common includes nothing of the kernel families, src/cuda/<family>/.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".inl", ".c", ".cpp", ".cu", ".cuh"}

# A layer may include files of itself and of the layers named here.
ALLOWED = {
    "include": set(),
    "core": {"include"},
    "cpu": {"core", "include"},
    "cuda": {"cuda_kernels", "cuda_common", "core", "include"},
    "cuda_kernels": {"cuda", "cuda_common", "core", "include"},
    "cuda_common": {"cuda", "core", "include"},
    "python": {"core", "include"},
    "tests": {"cpu", "core", "include"},
}
# Longest first, so that a folder goes before the one around it.
LAYERS = [
    ("src/cpp/include/", "include"),
    ("src/cuda/common/", "cuda_common"),
    ("src/cpp/python/", "python"),
    ("src/cpp/cpu/", "cpu"),
    ("tests/cpp/", "tests"),
    ("src/cuda/", "cuda"),
    ("src/cpp/", "core"),
]
SEARCHED = ["src/cpp/include", "src/cpp", "src/cpp/python", "src/cpp/cpu", "src/cuda", "tests/cpp"]
# Host libraries that a layer must not need.
FORBIDDEN = [
    (
        re.compile(r"^(cuda|cuda_runtime\w*|cuda_\w+|driver_types)\.h$"),
        {"include", "core", "cpu", "python", "tests"},
    ),
    (re.compile(r"^(nanobind/.*|Python\.h)$"), set(ALLOWED) - {"python"}),
    (re.compile(r"^(torch|ATen|c10)/"), set(ALLOWED)),
]


def layer_of(path: Path) -> str:
    """Name the layer of a file below the root."""
    name = path.relative_to(ROOT).as_posix()
    if re.match(r"src/cuda/(?!common/)\w+/", name):
        return "cuda_kernels"
    return next(layer for prefix, layer in LAYERS if name.startswith(prefix))


def resolve(source: Path, name: str) -> Path | None:
    """Find the project's file that an include names; None for one of another library."""
    for folder in [source.parent, *(ROOT / searched for searched in SEARCHED)]:
        candidate = (folder / name).resolve()
        if candidate.is_file() and ROOT in candidate.parents:
            return candidate
    return None


def violations(source: Path) -> list[str]:
    """List what is wrong with the includes of one file."""
    layer = layer_of(source)
    where = source.relative_to(ROOT)
    found = []
    for kind, name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        target = resolve(source, name)
        if target is None:
            found += [
                f"{where}: layer '{layer}' must not need <{name}>"
                for pattern, layers in FORBIDDEN
                if layer in layers and pattern.match(name)
            ]
            if kind == '"':
                found.append(f'{where}: "{name}" is no file of the project')
        elif layer_of(target) not in ALLOWED[layer] | {layer}:
            found.append(f"{where}: layer '{layer}' must not include {name} of layer '{layer_of(target)}'")
    return found


def main() -> int:
    """Check every C++ and CUDA file; return the exit status."""
    sources = [
        path
        for folder in ("src", "tests/cpp")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
    ]
    if not sources:
        print("no source files found")
        return 1
    found = [line for source in sources for line in violations(source)]
    print("\n".join(found) if found else f"includes of {len(sources)} files point in the right direction")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
