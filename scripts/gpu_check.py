# SPDX-License-Identifier: Apache-2.0
"""Build, test and check tiledattn on a machine with a CUDA GPU, in one call.

Writes one JSON file (machine, versions, date, command, one entry for each step) and a log of each step, and prints a
short table last. Exits with 1 if a step failed.

    python scripts/gpu_check.py --out benchmarks/results/gpu_check.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "gpu-site"
BUILD = ROOT / "build" / "gpu"
LAST_STEP = "pytest-cpu"
ALONE = ["streams", "torch_ops", "torch_sdpa", "torch_flash_attn", "transformers", "jax", "cupy"]


@dataclass
class Step:
    """One command: what it was for and how it ended."""

    name: str
    command: str
    seconds: float
    passed: bool
    summary: str


def pattern_of_summary(name: str) -> str:
    """Find the line of a step's output that says how it ended."""
    return {
        "ctest": r"\d+% tests passed.*",
        "memcheck": r"ERROR SUMMARY: .*",
        "racecheck": r"RACECHECK SUMMARY: .*",
        "demo": r"(?i)^verify.*|.*logits.*",
    }.get(name, r"^=* ?\d+ (passed|failed).*|^(SKIPPED|FAILED).*")


def run(name: str, command: list[str], log_dir: Path, limit_s: float, env: dict[str, str]) -> Step:
    """Run one command with its output in a log file; the summary is its last telling line."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            timeout=limit_s,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        output += f"\nstopped after {limit_s:.0f} s\n"
        code = 124
    except FileNotFoundError as missing:
        output, code = f"{missing}\n", 127
    (log_dir / f"{name}.log").write_text(output)
    telling = [line.strip(" =") for line in output.splitlines() if re.search(pattern_of_summary(name), line)]
    lines = output.strip().splitlines() or [""]
    summary = (telling or lines)[-1]
    return Step(name, " ".join(command), round(time.monotonic() - start, 1), code == 0, summary[:160])


def commit() -> str:
    """The commit that the tree is of, marked where the tree differs from it."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def machine() -> dict[str, str]:
    """Describe the machine and the versions that a result depends on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = {"gpu": subprocess.run(query, capture_output=True, text=True).stdout.strip()}
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(nvcc).exists():
        found["nvcc"] = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split(
            "\n"
        )[-2]
    found["python"] = platform.python_version()
    for package in ("numpy", "torch", "cupy-cuda13x", "jax", "nanobind", "nanobind-backend"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def steps(log_dir: Path, quick: bool, site: Path | None) -> Iterator[Step]:
    """Every step in order; after a failed build nothing else can say anything.

    With a site, what is installed there is tested; the C++ tests, which come of a build, are left out.
    """
    # JAX would take three quarters of the GPU's memory for itself.
    env = dict(os.environ, PYTHONUNBUFFERED="1", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    python = sys.executable
    build = [python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--upgrade"]
    build += ["--target", str(SITE), "-Ccmake.define.TILEDATTN_TESTS=ON", "-Ccmake.define.TILEDATTN_CUDA=ON"]
    build += [f"-Cbuild-dir={BUILD}", "."]
    if site is None:
        built = run("build", build, log_dir, 580, env)
        yield built
        if not built.passed:
            return
    env["PYTHONPATH"] = os.pathsep.join([str(site or SITE), env.get("PYTHONPATH", "")])
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    on_gpu = [*pytest, "-m", "gpu", "--timeout", "120"]
    # Tests of streams watch the GPU's clock and memory, and torch's compiler forks: nothing may run
    # beside them.
    alone = [f"tests/test_{name}.py" for name in ALONE]
    yield run("pytest-alone", [*on_gpu, *alone], log_dir, 300, env)
    workers = str(max(1, min(12, (os.cpu_count() or 1) - 2)))
    side_by_side = ["-n", workers, "-p", "no:benchmark"] if importlib.util.find_spec("xdist") else []
    others = [*on_gpu, *side_by_side, *(f"--ignore={path}" for path in alone)]
    # The workers fill the cores; more threads in each would only wait for each other.
    beside = dict(env, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TILEDATTN_NUM_THREADS="2")
    yield run("pytest-gpu", others, log_dir, 400, beside)
    if quick:
        return
    if site is None:
        yield run("ctest", ["ctest", "--test-dir", str(BUILD), "--output-on-failure"], log_dir, 200, env)
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", python, "tests/core_set.py", "cuda"]
        yield run(tool, command, log_dir, 250, env)
    demo = [python, "-m", "tiledattn.cli", "demo", "--device", "cuda", "--random-weights", "0", "--verify"]
    yield run("demo", [*demo, "--tokens", "32"], log_dir, 200, env)
    yield run(LAST_STEP, [*pytest, *side_by_side, "-m", "not gpu"], log_dir, 400, beside)


def main() -> int:
    """Run the steps, write the result file, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.json", help="result file")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build" / "gpu-logs", help="folder of the steps' output"
    )
    parser.add_argument("--commit", help="of the tree, where it comes without its history")
    parser.add_argument("--site", type=Path, help="of an installation to test, instead of building one")
    parser.add_argument("--quick", action="store_true", help="only the build and the tests marked gpu")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": args.commit or commit(),
        "command": "python scripts/gpu_check.py"
        + (" --quick" if args.quick else "")
        + (" --site SITE" if args.site else ""),
        "machine": machine(),
        "complete": False,
        "steps": [],
    }

    def write() -> None:
        text = json.dumps(result, indent=2).replace(str(ROOT), ".").replace(sys.executable, "python")
        args.out.write_text(text + "\n")

    # After each step, so that what was found is kept when the time on the machine ends.
    for step in steps(args.logs, args.quick, args.site):
        result["steps"].append(asdict(step))
        print(f"{'ok  ' if step.passed else 'FAIL'} {step.name:<14} {step.seconds:7.1f} s  {step.summary}")
        write()
    result["complete"] = result["steps"][-1]["name"] == LAST_STEP
    write()
    return 0 if all(step["passed"] for step in result["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
