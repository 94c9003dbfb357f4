# SPDX-License-Identifier: Apache-2.0
"""A real language model whose KV cache lies in a file and is attended to tile by tile.

`app` puts the parts together for ``tiledattn demo``. The parts, each of use alone: `model` (Llama in
NumPy), `gguf_file` and `tokenizer` (SmolLM2's file), `kv_file` (blocks of K and V on disk), `attention`
(how the library is called), `verify` (the same with dense attention).
"""
