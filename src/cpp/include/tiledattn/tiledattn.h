// SPDX-License-Identifier: Apache-2.0
// All of the C++ API.
#pragma once

#include "tiledattn/attention.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"
#include "tiledattn/options.h"
#include "tiledattn/streaming.h"
#include "tiledattn/tensor.h"
#include "tiledattn/tile_source.h"
#include "tiledattn/workspace.h"
