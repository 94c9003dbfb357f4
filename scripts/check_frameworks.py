# SPDX-License-Identifier: Apache-2.0
"""Run README's examples and the tests of JAX in new virtual environments, each with one framework alone.

    python scripts/check_frameworks.py                     # all
    python scripts/check_frameworks.py torch jax           # only these
    python scripts/check_frameworks.py --python python3.13 jax-newest
    python scripts/check_frameworks.py --wheel FILE.whl    # do not build one first

numpy, torch, jax: README's example of that name runs, and no other framework is there. jax-oldest and jax-newest: the
tests of tiledattn.jax under the oldest supported JAX and the newest that this Python gets.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["hypothesis", "ml_dtypes", "pytest>=8", "pytest-timeout"]
#: Packages of each environment, beside the wheel; "torch" and "jax" stand for what pyproject.toml says of them.
ENVIRONMENTS = {
    "numpy": [],
    "torch": ["torch"],
    "jax": ["jax"],
    "jax-oldest": ["jax", *TESTS],
    "jax-newest": ["jax", *TESTS],
}
FRAMEWORKS = ("torch", "jax", "cupy")


def requirement(name: str, *, oldest: bool = False) -> str:
    """Read the requirement of an extra from pyproject.toml: "jax>=0.6", or "jax==0.6.*" for the oldest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf'^{name} = \["({name}>=[^"]+)"\]', text, re.MULTILINE)
    if not match:
        raise SystemExit(f"pyproject.toml has no extra {name} of one requirement")
    return match[1].replace(">=", "==") + ".*" if oldest else match[1]


def example(name: str) -> str:
    """Cut the code after the marker <!-- example: NAME --> out of README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"<!-- example: {name} -->\s*```python\n(.*?)```", readme, re.DOTALL)
    if len(found) != 1:
        raise SystemExit(f"README.md has {len(found)} examples marked {name}; wanted 1")
    return str(found[0])


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command; show all that it said where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def build(python: str, folder: Path) -> Path:
    """Make a wheel for the CPU."""
    run(
        python,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        folder,
        ROOT,
        cwd=ROOT,
        TILEDATTN_CUDA="OFF",
    )
    return next(folder.glob("tiledattn-*.whl"))


def check(name: str, wheel: Path, python: str, folder: Path) -> str:
    """Make one environment and run in it; return what to say of it."""
    run(python, "-m", "venv", folder / name, cwd=folder)
    inside = folder / name / "bin" / "python"
    packages = [
        requirement(package, oldest=name == "jax-oldest") if package in FRAMEWORKS else package
        for package in ENVIRONMENTS[name]
    ]
    run(inside, "-m", "pip", "install", "--quiet", wheel, *packages, cwd=folder)
    versions = run(inside, "-m", "pip", "list", "--format", "freeze", cwd=folder)
    shown = " ".join(re.findall(r"^(?:numpy|torch|jax|jaxlib)==\S+", versions, re.MULTILINE))
    if name.startswith("jax-"):
        tests = ["tests/test_jax.py", "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
        shutil.copytree(
            ROOT / "tests", folder / f"{name}-tests" / "tests", ignore=shutil.ignore_patterns("cpp")
        )
        shutil.copy(ROOT / "pyproject.toml", folder / f"{name}-tests")
        said = run(inside, "-m", "pytest", *tests, cwd=folder / f"{name}-tests", JAX_PLATFORMS="cpu")
        return f"{shown}: {said.strip().splitlines()[-1]}"
    others = [other for other in FRAMEWORKS if other != name]
    code = example(name) + (
        "\nimport importlib.util\n"
        f"found = [name for name in {others} if importlib.util.find_spec(name)]\n"
        "assert not found, found\n"
    )
    run(inside, "-c", code, cwd=folder, JAX_PLATFORMS="cpu")
    return f"{shown}: README's example ran"


def main() -> int:
    """Check what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *ENVIRONMENTS], help="environments; all by default")
    parser.add_argument("--python", default=sys.executable, help="Python of the environments")
    parser.add_argument("--wheel", type=Path, help="a wheel to install; built from here by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiledattn-frameworks.") as temporary:
        folder = Path(temporary)
        wheel = options.wheel.resolve() if options.wheel else build(options.python, folder)
        for name in options.names or ENVIRONMENTS:
            print(f"{name:10}  {check(name, wheel, options.python, folder)}", flush=True)
            shutil.rmtree(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
