// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks what a shared library of tiledattn exports; everything else stays hidden.
#if defined(__GNUC__)
#define TILEDATTN_API __attribute__((visibility("default")))
#else
#define TILEDATTN_API
#endif
