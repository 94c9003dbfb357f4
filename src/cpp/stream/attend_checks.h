// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "stream/stream_plan.h"
#include "tiledattn/streaming.h"

namespace tiledattn {

/// What attend() has to fetch. Throws, naming the argument, for anything that it cannot do; nothing
/// is changed or read.
StreamRequest check_attend(const TiledAttentionDims& dims, Device device, const AttendArgs& args);

}  // namespace tiledattn
